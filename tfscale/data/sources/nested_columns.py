"""Columns of objects and of lists of lists, as columns of plain values.

    {"a": {"b": 1}, "c": [{"d": 2}, {"d": 3}]}   ->   a.b: 1    c.d: [2, 3]

An object is the columns of its keys. A list of objects is one list for each of
their keys, which have one length.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfscale.data.sources import arrow_values


def leaves(columns: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Columns without objects, by the path of keys that leads to each.

    Args:
        columns: Dict from name to pyarrow column.
    """
    import pyarrow

    found: dict[tuple[Any, ...], Any] = {}
    for name, column in columns.items():
        if not _holds_object(column.type):
            found[(name,)] = column
            continue
        for path, values in _leaves((name,), column.combine_chunks()):
            found[path] = pyarrow.chunked_array([values])
    return found


def _leaves(path: tuple[str, ...], column: Any) -> Iterator[tuple[Any, Any]]:
    import pyarrow
    from pyarrow import compute

    kind = column.type
    if not _holds_object(kind):
        yield path, column
    elif pyarrow.types.is_struct(kind):
        for number, field in enumerate(kind):
            values = compute.struct_field(column, [number])
            yield from _leaves((*path, field.name), values)
    else:
        lengths = compute.list_value_length(column).fill_null(0).to_numpy()
        ends = np.cumsum([0, *lengths], dtype=np.int64)
        for inner, values in _leaves(path, compute.list_flatten(column)):
            yield inner, pyarrow.LargeListArray.from_arrays(ends, values)


def _holds_object(kind):
    """Whether it is one, or a list of such; one without a key counts not."""
    import pyarrow

    while arrow_values.is_list(kind):
        kind = kind.value_type
    return pyarrow.types.is_struct(kind) and kind.num_fields > 0


def leaf_and_depth(kind: Any) -> tuple[Any, int]:
    """The pyarrow type of the values in lists of lists, and how deep."""
    kind, depth = arrow_values.plain(kind), 0
    while arrow_values.is_list(kind):
        kind, depth = arrow_values.plain(kind.value_type), depth + 1
    return kind, depth


def flat(path: tuple[Any, ...], column: Any, depth: int) -> Any:
    """The shapes of a column's lists of lists, and all their values.

    Args:
        path: Keys that lead to the column, for errors.
        column: Pyarrow column of lists.
        depth: Integer, how deep they are.

    Returns:
        `(shapes, values)`: an int32 array of shape `(rows, depth)`, and a
        pyarrow column.

    Raises:
        ValueError: If the lists within a row differ in length.
    """
    from pyarrow import compute

    rows = np.arange(len(column))  # of each list that is looked at
    shapes = np.zeros([len(column), depth], np.int32)
    for level in range(depth):
        lengths = compute.list_value_length(column).fill_null(0).to_numpy()
        np.maximum.at(shapes[:, level], rows, lengths)
        wrong = np.flatnonzero(lengths != shapes[rows, level])
        if wrong.size:
            row = rows[wrong[0]]
            found = sorted(set(lengths[rows == row].tolist()))
            raise ValueError(
                "Lists within a row must be of one length, an array. Received: "
                f"column {'.'.join(path)!r}, row {row}: lengths {found}. Pad "
                "them in the file, or leave the column out of `columns`."
            )
        rows = np.repeat(rows, lengths)
        column = compute.list_flatten(column)
    return shapes, column


def nested(record: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Values by their paths, as dicts of dicts."""
    whole: dict[str, Any] = {}
    for (*path, last), value in record.items():
        place = whole
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return whole
