"""How a row of a table is written as bytes, and read from them.

A row travels through the chain as bytes, as a record of any other file does,
and becomes columns in `decode`:

    numbers of all columns | lengths of the strings | strings
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class TableLayout:
    """The columns of a table, by the places of their bytes in a row.

    Args:
        schema: That of a pyarrow table, or None where there is no row.
        columns: Names of the columns to be read, or None for all.

    Raises:
        ValueError: If a column is missing, or holds no numbers or strings.

    Attributes:
        names: List of strings, the columns that are read.
    """

    def __init__(self, schema: Any, columns: Sequence[str] | None):
        import pyarrow

        fields = {} if schema is None else dict(zip(schema.names, schema.types))
        self.names = list(fields if columns is None else columns)
        missing = sorted(set(self.names) - set(fields))
        if missing or not self.names:
            raise ValueError(
                "`columns` must name columns of the files, at least one. "
                f"Received: {self.names}; there are {sorted(fields)}."
            )
        self._numbers, self._strings = {}, []
        for name in self.names:
            kind = fields[name]
            if pyarrow.types.is_boolean(kind):
                self._numbers[name] = np.dtype(np.bool_)
            elif pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(
                kind
            ):
                self._numbers[name] = np.dtype(kind.to_pandas_dtype())
            elif (
                pyarrow.types.is_string(kind)
                or pyarrow.types.is_large_string(kind)
                or pyarrow.types.is_binary(kind)
            ):
                self._strings.append(name)
            else:
                raise ValueError(
                    "A column must hold numbers, booleans or strings. "
                    f"Received: {name!r} of {kind}. Leave it out of `columns`."
                )

    def rows(self, table: Any) -> list[bytes]:
        """The rows of a pyarrow table as bytes."""
        parts = []
        for name, dtype in self._numbers.items():
            column = table.column(name).combine_chunks()
            if dtype.kind != "f":
                column = column.fill_null(False if dtype.kind == "b" else 0)
            values = column.to_numpy(zero_copy_only=False).astype(dtype)
            parts.append(values.view(np.uint8).reshape(len(values), -1))
        strings = [
            [
                value.encode() if isinstance(value, str) else value or b""
                for value in table.column(name).to_pylist()
            ]
            for name in self._strings
        ]
        for values in strings:
            sizes = np.array([len(value) for value in values], np.int32)
            parts.append(sizes.view(np.uint8).reshape(len(sizes), -1))
        if not table.num_rows:
            return []
        fixed = np.concatenate(parts, axis=1)
        width, flat = fixed.shape[1], fixed.tobytes()
        heads = [flat[at : at + width] for at in range(0, len(flat), width)]
        return [b"".join(row) for row in zip(heads, *strings, strict=True)]

    def decode(self, row: tf.Tensor) -> dict[str, tf.Tensor]:
        """Columns of a row; of single records, or of batches of them."""
        record, at = {}, 0
        for name, dtype in self._numbers.items():
            part = tf.strings.substr(row, at, dtype.itemsize)
            record[name] = tf.io.decode_raw(part, tf.as_dtype(dtype))[0]
            at += dtype.itemsize
        sizes = []
        for _ in self._strings:
            part = tf.strings.substr(row, at, 4)
            sizes.append(tf.io.decode_raw(part, tf.int32)[0])
            at += 4
        begin = tf.constant(at)
        for name, size in zip(self._strings, sizes, strict=True):
            record[name] = tf.strings.substr(row, begin, size)
            begin = begin + size
        return {name: record[name] for name in self.names}
