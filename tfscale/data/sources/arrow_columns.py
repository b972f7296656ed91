"""Columns of Arrow tables as arrays.

    numbers, strings          an array of shape (rows,)
    lists of one known size   an array of shape (rows, size)
    other lists               one serialized tensor a row
    objects                   the columns of their keys
    lists of objects          lists, one for each key

A missing value is 0, NaN, "" or an empty list.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources.row_format import Leaf
from tfscale.data.sources.row_format import Path
from tfscale.data.sources.row_format import RowFormat
from tfscale.data.sources.row_format import serialized


class ArrowColumns:
    """The columns of pyarrow tables with one schema; None if there is no row.

    `names` are the columns that are read, `rows` is their `RowFormat`.
    """

    def __init__(self, schema: Any, columns: Sequence[str] | None):
        there = [] if schema is None else schema.names
        self.names = list(dict.fromkeys(there if columns is None else columns))
        once = bool(self.names) and all(
            there.count(name) == 1 for name in self.names
        )
        # Without a row, the pipeline raises an error that says so.
        if schema is not None and (isinstance(columns, str) or not once):
            raise ValueError(
                "`columns` must be a list of columns of the files, at least "
                "one, each there once. Received: "
                f"columns={columns!r}; there are {sorted(there)}."
            )
        leaves: dict[Path, Leaf] = {}
        table = schema.empty_table() if there else None
        for path, column in self._columns(table) if there else ():
            leaves[path] = _leaf(path, column.type, schema.field(path[0]))
        self.rows = RowFormat(leaves)

    def _columns(self, table):
        for name in self.names:
            yield from _without_objects((name,), table.column(name))

    def read(self, table: Any) -> list[np.ndarray]:
        """The rows of a pyarrow table, packed."""
        return self.rows.packed(
            values_of(path, column, self.rows.leaves[path])
            for path, column in self._columns(table)
        )


def dtype_of(kind: Any) -> tf.DType | None:
    """The dtype of a pyarrow type of numbers, times or strings; or None."""
    import pyarrow

    types, kind = pyarrow.types, without_dictionary(kind)
    if _is_any(kind, "string", "large_string", "binary", "large_binary"):
        return tf.string
    if types.is_temporal(kind) and not types.is_interval(kind):
        return tf.as_dtype(f"int{kind.bit_width}")
    if types.is_boolean(kind):
        return tf.bool
    if types.is_integer(kind) or types.is_floating(kind):
        return tf.as_dtype(kind.to_pandas_dtype())
    return None


def without_dictionary(kind: Any) -> Any:
    """The pyarrow type of values that a dictionary may number."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def leaf_and_rank(kind: Any) -> tuple[Any, int]:
    """The pyarrow type of the values in nested lists, and their depth."""
    rank = 0
    while is_list(kind):
        kind, rank = kind.value_type, rank + 1
    return kind, rank


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type is a kind of list."""
    return _is_any(kind, "list", "large_list", "fixed_size_list")


def _is_any(kind, *names):
    import pyarrow

    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def values(column: Any, dtype: tf.DType) -> np.ndarray:
    """Values of a pyarrow column, with 0, NaN or "" for what is missing."""
    import pyarrow

    kind = without_dictionary(column.type)
    column = column.cast(kind)
    if dtype == tf.string:
        column = column.cast(pyarrow.large_binary()).fill_null(b"")
        return column.to_numpy(zero_copy_only=False)
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if pyarrow.types.is_temporal(kind):
        column = column.view(f"int{kind.bit_width}")
    if not dtype.is_floating:
        column = column.fill_null(False if dtype == tf.bool else 0)
    found = column.to_numpy(zero_copy_only=False)
    return found.astype(dtype.as_numpy_dtype)


def _leaf(path, kind, field):
    inner, rank = leaf_and_rank(kind)
    dtype = dtype_of(inner)
    if dtype is None:
        raise ValueError(
            "A column must hold numbers, booleans, dates, strings, or lists"
            f" or objects of these. Received: {'.'.join(path)!r} of {kind}."
            " Leave it out of `columns`."
        )
    shape = None if rank else ()
    size = getattr(kind, "list_size", None)
    if size is not None and rank == len(path) == 1 and not field.nullable:
        shape = (size,)
    return Leaf(dtype, shape, rank)


def _without_objects(path, column):
    """Columns without objects, by the path of keys that leads to each."""
    import pyarrow
    from pyarrow import compute

    kind = column.type
    inner, rank = leaf_and_rank(kind)
    # An object without keys is no column: `_leaf` refuses it.
    if not pyarrow.types.is_struct(inner) or not inner.num_fields:
        yield path, column
    elif not rank:
        for number, field in enumerate(kind):
            child = compute.struct_field(column, [number])
            yield from _without_objects((*path, field.name), child)
    else:
        ends = np.cumsum([0, *_lengths(column)], dtype=np.int64)
        flat = compute.list_flatten(column)
        for found, child in _without_objects(path, flat):
            if isinstance(child, pyarrow.ChunkedArray):
                child = child.combine_chunks()
            yield found, pyarrow.LargeListArray.from_arrays(ends, child)


def _lengths(column):
    from pyarrow import compute

    return compute.list_value_length(column).fill_null(0).to_numpy()


def values_of(
    path: Path, column: Any, leaf: Leaf, numbers: Sequence[int] | None = None
) -> np.ndarray:
    """The values of a pyarrow column without objects, row by row.

    The path of keys and the numbers of the rows are for errors.
    """
    from pyarrow import compute

    if leaf.shape is None:
        return _serialized_rows(path, column, leaf, numbers)
    while is_list(column.type):
        column = compute.list_flatten(column)
    return values(column, leaf.dtype).reshape(-1, *leaf.shape)


def _serialized_rows(path, column, leaf, numbers):
    """The lists of each row, which must be an array, as bytes."""
    from pyarrow import compute

    count = len(column)
    rows = np.arange(count)  # of each list that is looked at
    shapes = np.zeros([count, leaf.rank], np.int32)
    for level in range(leaf.rank):
        lengths = _lengths(column)
        np.maximum.at(shapes[:, level], rows, lengths)
        wrong = np.flatnonzero(lengths != shapes[rows, level])
        if wrong.size:
            row = rows[wrong[0]]
            found = sorted(set(lengths[rows == row].tolist()))
            raise ValueError(
                "The lists in a row must have one length, like an array. "
                f"Received: column {'.'.join(path)!r}, row "
                f"{row if numbers is None else numbers[row]}: lengths {found}. "
                "Pad them in the data, or leave the column out of `columns`."
            )
        rows = np.repeat(rows, lengths)
        column = compute.list_flatten(column)
    flat = values(column, leaf.dtype)
    ends = np.cumsum([0, *shapes.prod(axis=1)]).tolist()
    found = np.empty([count], object)
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        array = flat[begin:end].reshape(shapes[row])
        found[row] = serialized(array, leaf.dtype)
    return found
