"""Rows of a Hugging Face dataset, read at random from its Arrow table.

Not through its arrays for NumPy: those make float64 float32, a missing integer
the smallest one, and take zeros off the ends of bytes.

Where all rows of a column have arrays of one shape, which is seen before the
first step, they travel as numbers of a known length, in batches. Else what is
more than a vector travels as one, with its shape beside it:

    image of shape (2, 3, 3)  ->  18 numbers, and 2 3 3  ->  decode  ->  image
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import arrow_values
from tfscale.data.sources import fetched_source
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.table_layout import TableLayout

# Rows that are looked at to know a dataset again.
_NUM_MARKED = 256


def hugging_face(
    dataset: Any, columns: Sequence[str] | None = None
) -> IndexedSource:
    """Records are the rows of a `datasets.Dataset` of Hugging Face.

    Args:
        dataset: `datasets.Dataset`, one split, not streamed.
        columns: List of strings, the columns to be read; by default all.

    Returns:
        A source of dicts from column to tensor, of the column's own dtype: a
        scalar; a vector where it has lists of numbers, which may differ in
        length; an array where it has arrays or images, of any size. A missing
        number is 0 or NaN, a missing string "", a missing list empty.

    Raises:
        TypeError: If it cannot be read at random, or a column holds neither
            numbers, strings, arrays of numbers nor images.
        ValueError: If a column is missing, there is no row, or the dataset has
            a transform, which is not run here.

    Example:

    >>> import datasets
    >>> table = datasets.Dataset.from_dict({"x": [1, 2], "y": ["a", "b"]})
    >>> source = hugging_face(table)
    >>> source.num_records, source.decode(source.read(1))["y"].numpy()
    (2, b'b')
    """
    names = _checked(dataset, columns)
    rows = dataset.select_columns(names).with_format("arrow")
    readers = {name: _reader(name, rows.features[name]) for name in names}
    fixed = {name: _shape_of_all(rows.data.column(name)) for name in names}
    fixed = {name: shape for name, shape in fixed.items() if shape}
    readers = {n: r for n, r in readers.items() if r and n not in fixed}
    first = rows[:1]
    likes = {name: read(first[name], 0) for name, read in readers.items()}

    def vectors(table, numbers):
        """The table with vectors, and their shapes, for arrays."""
        for name, shape in fixed.items():
            field, column = _of_one_size(name, table[name], math.prod(shape))
            place = table.column_names.index(name)
            table = table.set_column(place, field, column)
        for name, read in readers.items():
            found = [
                _like(likes[name], read(table[name].slice(at, 1), number), name)
                for at, number in enumerate(numbers)
            ]
            flat, shapes = _flat(found)
            place = table.column_names.index(name)
            table = table.set_column(place, name, flat)
            table = table.append_column(_shape_of(name), shapes)
        return table

    layout = TableLayout(vectors(first, [0]).schema, None)

    def fetch(index):
        numbers = index.tolist()
        return layout.rows(vectors(rows[numbers], numbers))

    def decode(row):
        record = layout.decode(row)
        for name, shape in fixed.items():
            record[name] = tf.reshape(record[name], shape)
        for name, like in likes.items():
            array = tf.reshape(record[name], record.pop(_shape_of(name)))
            array.set_shape([None] * like.ndim)
            record[name] = array
        return record

    def mark():
        """What a cache knows the rows by: how many, and some all over them."""
        step = max(len(rows) // _NUM_MARKED, 1)
        some = fetch(np.arange(0, len(rows), step))
        return repr((names, len(rows), some)).encode()

    return fetched_source.fetched(
        "hugging_face", len(rows), fetch, mark, decode=decode
    )


def _checked(dataset, columns):
    """Names of the columns to be read."""
    at_random = hasattr(dataset, "__len__") and hasattr(dataset, "features")
    if isinstance(dataset, dict) or not at_random:
        raise TypeError(
            "`dataset` must be one split of a dataset that is read at random. "
            f"Received: a {type(dataset).__name__}. Choose a split; for what "
            "is streamed there is `tfscale.data.dataset`."
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "A dataset's transform is not run here. Received: a dataset "
            "`with_transform`. Take it away by `reset_format`, and use the "
            "pipeline's `parse`, or the dataset's `map`."
        )
    there = dataset.column_names
    names = list(dict.fromkeys(there if columns is None else columns))
    if isinstance(columns, str) or not names or set(names) - set(there):
        raise ValueError(
            "`columns` must be a list of columns of the dataset, at least one."
            f" Received: {columns!r}; there are {there}."
        )
    if not len(dataset):
        raise ValueError(
            "The dataset is empty: there is nothing to train on. Received: a "
            "`datasets.Dataset` without a row."
        )
    return names


def _reader(name, feature):
    """Function from a column of one row to its array; None for plain values."""
    import datasets
    import pyarrow

    kind = datasets.Features({name: feature}).arrow_schema.field(name).type
    if isinstance(feature, datasets.Image) and feature.decode:
        return _image_reader(name, feature)
    if arrow_values.is_plain(kind):
        return None
    if isinstance(kind, pyarrow.ExtensionType):
        kind = kind.storage_type
    leaf = kind
    while arrow_values.is_list(leaf):
        leaf = leaf.value_type
    dtype = arrow_values.number_dtype(leaf)
    if not arrow_values.is_list(kind) or dtype is None:
        raise TypeError(
            "A column must hold numbers, strings, arrays of numbers or images."
            f" Received: {name!r} of {kind}. Leave it out of `columns`, or "
            "make it one with the dataset's `map`."
        )
    return _nested_reader(name, dtype)


def _image_reader(name, feature):
    def read(column, number):
        value = column.to_pylist()[0]
        if value is None:
            raise _missing(name, number)
        try:
            return np.asarray(feature.decode_example(value))
        except OSError as error:
            raise ValueError(
                f"An image cannot be decoded. Received: column {name!r}, row "
                f"{number}: {error}. Leave such rows out with the dataset's "
                "`filter`."
            ) from error

    return read


def _nested_reader(name, dtype):
    from pyarrow import compute

    def read(column, number):
        column = _stored(column)
        shape = []
        while arrow_values.is_list(column.type):
            lengths = set(compute.list_value_length(column).to_pylist())
            if None in lengths:
                raise _missing(name, number)
            if len(lengths) > 1:
                raise ValueError(
                    "Lists within a row must be of one length, an array. "
                    f"Received: column {name!r}, row {number}: lengths "
                    f"{sorted(lengths)}. Pad them with the dataset's `map`."
                )
            shape.append(max(lengths, default=0))
            column = compute.list_flatten(column)
        return arrow_values.numbers(column, dtype).reshape(shape)

    return read


def _stored(column):
    """A column of lists, also where it is one of Hugging Face's arrays."""
    import pyarrow

    if not isinstance(column.type, pyarrow.ExtensionType):
        return column
    return pyarrow.chunked_array([chunk.storage for chunk in column.chunks])


def _shape_of_all(column):
    """The shape that the lists of all rows have, or None."""
    from pyarrow import compute

    column, shape = _stored(column), []
    while arrow_values.is_list(column.type):
        lengths = compute.list_value_length(column)
        ends = compute.min_max(lengths).as_py()
        if lengths.null_count or not ends["max"] or ends["min"] != ends["max"]:
            return None
        shape.append(ends["max"])
        column = compute.list_flatten(column)
    # The leaves of others, such as strings, are refused or read as they are.
    return shape if arrow_values.number_dtype(column.type) else None


def _of_one_size(name, column, size):
    """A column of so many numbers in each row, and its field."""
    import pyarrow
    from pyarrow import compute

    column = _stored(column)
    while arrow_values.is_list(column.type):
        column = compute.list_flatten(column)
    dtype = arrow_values.number_dtype(column.type)
    values = pyarrow.array(arrow_values.numbers(column, dtype))
    lists = pyarrow.FixedSizeListArray.from_arrays(values, size)
    return pyarrow.field(name, lists.type, nullable=False), lists


def _missing(name, number):
    return ValueError(
        "Every row must have its array or image. Received: column "
        f"{name!r}, row {number}, which has none. Leave such rows out with "
        "the dataset's `filter`."
    )


def _like(first, array, name):
    """The array, which is as the first one, but for its sizes."""
    if array.ndim != first.ndim or array.dtype != first.dtype:
        raise ValueError(
            "Arrays of a column must be of one dtype and number of dimensions."
            f" Received: {name!r} with {array.dtype} of shape {array.shape} "
            f"and {first.dtype} of shape {first.shape}. Make them so with the "
            "dataset's `map`, images by "
            f"`cast_column({name!r}, datasets.Image(mode='RGB'))`."
        )
    return array


def _flat(arrays):
    """Columns of vectors, and of their shapes."""
    import pyarrow

    ends = np.cumsum([0, *(array.size for array in arrays)])
    values = np.concatenate([array.reshape(-1) for array in arrays])
    flat = pyarrow.LargeListArray.from_arrays(ends, pyarrow.array(values))
    shapes = [array.shape for array in arrays]
    return flat, pyarrow.array(shapes, pyarrow.list_(pyarrow.int32()))


def _shape_of(name):
    return f"{name} (shape)"
