"""How a row of a table is written as bytes, and read from them.

A row travels through the chain as bytes, as a record of any other file does,
and becomes columns in `decode`:

    numbers of all columns | bytes of strings and lists | strings and lists

An object is the columns of its keys, a list of objects those of lists; a list
of lists is a vector, with its shape beside it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import arrow_values
from tfscale.data.sources import nested_columns

# Keys of a user's are strings; these are ours, of what an array needs.
_SHAPE, _LENGTHS = object(), object()
Path = tuple[Any, ...]


class TableLayout:
    """The columns of a table, by the places of their bytes in a row.

    Args:
        schema: That of a pyarrow table, or None where there is no row.
        columns: Names of the columns to be read, or None for all.

    Raises:
        ValueError: If a column is missing or there twice, or holds none
            of numbers, dates, strings, and lists and objects of these.

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
        # By the path of keys that leads to it: of a known length; None for a
        # scalar.
        self._numbers: dict[Path, tuple[np.dtype, int | None]] = {}
        # Of variable length; without a dtype: strings.
        self._variable: dict[Path, np.dtype | None] = {}
        # Lists of lists, and lists of strings: how deep they are.
        self._arrays: dict[Path, int] = {}
        if not there:
            return
        for path, column in self._leaves(schema.empty_table()).items():
            self._add(path, column.type, schema.field(path[0]))

    def _leaves(self, table):
        return nested_columns.leaves(
            {name: table.column(name) for name in self.names}
        )

    def _add(self, path, kind, field):
        leaf, depth = nested_columns.leaf_and_depth(kind)
        dtype = arrow_values.number_dtype(leaf)
        if dtype is None and not arrow_values.is_string(leaf):
            raise ValueError(
                "A column must hold numbers, booleans, dates, strings, or lists"
                f" or objects of these. Received: {'.'.join(path)!r} of {kind}."
                " Leave it out of `columns`."
            )
        size = getattr(kind, "list_size", None)
        whole = size is not None and not field.nullable and len(path) == 1
        if depth > 1 or (depth and dtype is None):
            self._arrays[path] = depth
            self._numbers[*path, _SHAPE] = (np.dtype(np.int32), depth)
            if dtype is None:
                self._variable[*path, _LENGTHS] = np.dtype(np.int32)
            self._variable[path] = dtype
        elif dtype is None or (depth and not whole):
            self._variable[path] = dtype
        else:
            self._numbers[path] = (dtype, size)

    def rows(self, table: Any) -> list[bytes]:
        """The rows of a pyarrow table as bytes.

        Raises:
            ValueError: If the lists within a row are no array.
        """
        from pyarrow import compute

        if not table.num_rows:
            return []
        leaves = self._leaves(table)
        fixed: list[np.ndarray] = []
        found: dict[Path, list[bytes]] = {}
        for path, depth in self._arrays.items():
            shapes, values = nested_columns.flat(path, leaves[path], depth)
            counts = shapes.prod(axis=1)
            dtype = self._variable[path]
            if dtype is None:
                words = arrow_values.strings(values)
                lengths = np.array([len(word) for word in words], np.int32)
                found[*path, _LENGTHS] = _cut(lengths.tobytes(), counts * 4)
                sums = np.cumsum([0, *lengths])
                ends = np.cumsum([0, *counts])
                found[path] = _cut(b"".join(words), np.diff(sums[ends]))
            else:
                flat = arrow_values.numbers(values, dtype).tobytes()
                found[path] = _cut(flat, counts * dtype.itemsize)
            leaves[*path, _SHAPE] = shapes
        for path, (dtype, size) in self._numbers.items():
            values = leaves[path]
            if path[-1] is not _SHAPE:
                if size is not None:
                    values = compute.list_flatten(values)
                values = arrow_values.numbers(values, dtype)
            values = np.ascontiguousarray(values).view(np.uint8)
            fixed.append(values.reshape(table.num_rows, -1))
        variable = [
            found[path]
            if path in found
            else arrow_values.strings(leaves[path])
            if dtype is None
            else _lists(leaves[path], dtype)
            for path, dtype in self._variable.items()
        ]
        for parts in variable:
            sizes = np.array([len(part) for part in parts], np.int32)
            fixed.append(sizes.view(np.uint8).reshape(len(sizes), -1))
        joined = np.concatenate(fixed, axis=1)
        width, whole = joined.shape[1], joined.tobytes()
        heads = [whole[at : at + width] for at in range(0, len(whole), width)]
        return [b"".join(row) for row in zip(heads, *variable, strict=True)]

    def decode(self, row: tf.Tensor) -> dict[str, Any]:
        """Columns of a row; of single records, or of batches of them."""
        record, at = {}, 0
        for path, (dtype, size) in self._numbers.items():
            width = dtype.itemsize * (1 if size is None else size)
            part = _decoded_numbers(tf.strings.substr(row, at, width), dtype)
            record[path] = part[0] if size is None else tf.reshape(part, [size])
            at += width
        sizes = []
        for _ in self._variable:
            part = tf.strings.substr(row, at, 4)
            sizes.append(tf.io.decode_raw(part, tf.int32)[0])
            at += 4
        begin = tf.constant(at)
        for (path, kind), size in zip(
            self._variable.items(), sizes, strict=True
        ):
            part = tf.strings.substr(row, begin, size)
            record[path] = part if kind is None else _decoded(part, kind)
            begin = begin + size
        for path in self._arrays:
            if self._variable[path] is None:
                lengths = record.pop((*path, _LENGTHS))
                begins = tf.cumsum(lengths, exclusive=True)
                whole = tf.fill(tf.shape(lengths), record[path])
                record[path] = tf.strings.substr(whole, begins, lengths)
            shape = record.pop((*path, _SHAPE))
            record[path] = tf.reshape(record[path], shape)
        nested = nested_columns.nested(record)
        return {name: nested[name] for name in self.names}


def _cut(values, sizes):
    """Bytes, in parts of given sizes."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def _lists(column, dtype):
    """The bytes of each list; one that is missing is empty."""
    from pyarrow import compute

    lengths = compute.list_value_length(column).fill_null(0).to_numpy()
    values = arrow_values.numbers(compute.list_flatten(column), dtype)
    return _cut(values.tobytes(), lengths.astype(np.int64) * dtype.itemsize)


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
