"""How a row of a table is written as bytes, and read from them.

A row travels through the chain as bytes, as a record of any other file does,
and becomes columns in `decode`:

    numbers of all columns | bytes of strings and lists | strings and lists
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
        ValueError: If a column is missing or there twice, or holds neither
            numbers, strings nor lists of numbers.

    Attributes:
        names: List of strings, the columns that are read.
    """

    def __init__(self, schema: Any, columns: Sequence[str] | None):
        there = [] if schema is None else schema.names
        self.names = list(dict.fromkeys(there if columns is None else columns))
        once = bool(self.names) and all(
            there.count(name) == 1 for name in self.names
        )
        # Without a row a pipeline says that the dataset is empty.
        if schema is not None and (isinstance(columns, str) or not once):
            raise ValueError(
                "`columns` must be a list of columns of the files, at least "
                "one, each of which there is once. Received: "
                f"columns={columns!r}; there are {sorted(there)}."
            )
        # Of a known length; None for a scalar.
        self._numbers: dict[str, tuple[np.dtype, int | None]] = {}
        # Of variable length; without a dtype: strings.
        self._variable: dict[str, np.dtype | None] = {}
        for name in self.names if there else ():
            field = schema.field(name)
            kind = plain(field.type)
            if not is_plain(kind):
                raise ValueError(
                    "A column must hold numbers, booleans, dates, strings or "
                    f"lists of numbers. Received: {name!r} of {kind}. Leave it "
                    "out of `columns`."
                )
            dtype = number_dtype(kind.value_type if is_list(kind) else kind)
            size = getattr(kind, "list_size", None)
            whole = size is not None and not field.nullable
            if dtype is None or (is_list(kind) and not whole):
                self._variable[name] = dtype
            else:
                self._numbers[name] = (dtype, size)

    def rows(self, table: Any) -> list[bytes]:
        """The rows of a pyarrow table as bytes."""
        from pyarrow import compute

        if not table.num_rows:
            return []
        parts = []
        for name, (dtype, size) in self._numbers.items():
            column = table.column(name)
            flat = column if size is None else compute.list_flatten(column)
            values = numbers(flat, dtype).view(np.uint8)
            parts.append(values.reshape(table.num_rows, -1))
        variable = [
            _strings(table.column(name))
            if dtype is None
            else _lists(table.column(name), dtype)
            for name, dtype in self._variable.items()
        ]
        for values in variable:
            sizes = np.array([len(value) for value in values], np.int32)
            parts.append(sizes.view(np.uint8).reshape(len(sizes), -1))
        fixed = np.concatenate(parts, axis=1)
        width, flat = fixed.shape[1], fixed.tobytes()
        heads = [flat[at : at + width] for at in range(0, len(flat), width)]
        return [b"".join(row) for row in zip(heads, *variable, strict=True)]

    def decode(self, row: tf.Tensor) -> dict[str, tf.Tensor]:
        """Columns of a row; of single records, or of batches of them."""
        record, at = {}, 0
        for name, (dtype, size) in self._numbers.items():
            width = dtype.itemsize * (1 if size is None else size)
            part = _decoded_numbers(tf.strings.substr(row, at, width), dtype)
            record[name] = part[0] if size is None else tf.reshape(part, [size])
            at += width
        sizes = []
        for _ in self._variable:
            part = tf.strings.substr(row, at, 4)
            sizes.append(tf.io.decode_raw(part, tf.int32)[0])
            at += 4
        begin = tf.constant(at)
        for name, size in zip(self._variable, sizes, strict=True):
            part = tf.strings.substr(row, begin, size)
            kind = self._variable[name]
            record[name] = part if kind is None else _decoded(part, kind)
            begin = begin + size
        return {name: record[name] for name in self.names}


def is_plain(kind: Any) -> bool:
    """Whether columns of a pyarrow type can be written."""
    kind = plain(kind)
    flat = kind.value_type if is_list(kind) else kind
    return _is_string(kind) or number_dtype(flat) is not None


def plain(kind: Any) -> Any:
    """The type of the values, where they are numbered in a dictionary."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def number_dtype(kind: Any) -> np.dtype | None:
    """The dtype of numbers, booleans and times; of others None."""
    import pyarrow

    types = pyarrow.types
    if _is_time(kind):
        return np.dtype(f"i{kind.bit_width // 8}")
    if types.is_boolean(kind):
        return np.dtype(np.bool_)
    if types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def _is_time(kind):
    """Whether a pyarrow type is one of dates or times: stored as integers."""
    import pyarrow

    types = pyarrow.types
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_date,
            types.is_time,
            types.is_timestamp,
            types.is_duration,
        )
    )


def _is_string(kind):
    import pyarrow

    types = pyarrow.types
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
        )
    )


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type is one of lists, of whatever."""
    import pyarrow

    types = pyarrow.types
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
        )
    )


def numbers(column: Any, dtype: np.dtype) -> np.ndarray:
    """Numbers of a pyarrow column, with 0 or NaN for what is missing."""
    column = column.cast(plain(column.type)).combine_chunks()
    if _is_time(column.type):
        column = column.view(f"int{column.type.bit_width}")
    if dtype.kind != "f":
        column = column.fill_null(False if dtype.kind == "b" else 0)
    return column.to_numpy(zero_copy_only=False).astype(dtype)


def _strings(column):
    values = column.cast(plain(column.type)).to_pylist()
    return [
        value.encode() if isinstance(value, str) else value or b""
        for value in values
    ]


def _lists(column, dtype):
    """The bytes of each list; one that is missing is empty."""
    from pyarrow import compute

    lengths = compute.list_value_length(column).fill_null(0).to_numpy()
    flat = numbers(compute.list_flatten(column), dtype).tobytes()
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    begins = ends - lengths * dtype.itemsize
    return [flat[a:b] for a, b in zip(begins, ends, strict=True)]


def _decoded_numbers(part, dtype):
    if dtype.kind == "u" and dtype.itemsize > 2:  # not read by TensorFlow
        signed = np.dtype(f"i{dtype.itemsize}")
        return tf.bitcast(_decoded_numbers(part, signed), tf.as_dtype(dtype))
    return tf.io.decode_raw(part, tf.as_dtype(dtype))


def _decoded(part, dtype):
    """A vector: its own operation, as batches have no single length."""
    length = tf.strings.length(part)
    flat = tf.io.decode_raw(part, tf.uint8, fixed_length=tf.maximum(length, 1))[
        :length
    ]
    return _of_bytes(tf.reshape(flat, [-1, dtype.itemsize]), dtype)


def _of_bytes(rows, dtype):
    if dtype.kind == "b":
        return tf.cast(rows[:, 0], tf.bool)
    if dtype.itemsize == 1:
        return tf.bitcast(rows[:, 0], tf.as_dtype(dtype))
    return tf.bitcast(rows, tf.as_dtype(dtype))
