"""Rows of a Hugging Face dataset, read at random or as a stream.

The rows are read as Arrow tables. The NumPy arrays of `datasets` turn float64
into float32 and missing integers into the smallest one, and take zeros off the
ends of bytes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import arrow_columns
from tfscale.data.sources import stream_source
from tfscale.data.sources.row_format import Leaf
from tfscale.data.sources.row_format import RowFormat
from tfscale.data.sources.row_format import serialized
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import StreamSource
from tfscale.data.sources.source import from_python

_NUM_MARKED = 256  # rows by which a cache identifies a dataset
_NUM_STREAMED = 32  # rows of a stream that are read at a time
_NUM_TRIED = 4  # rows on which a transform is compared with itself


def hugging_face(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    num_records: int | None = None,
) -> IndexedSource | StreamSource:
    """Records are the rows of a dataset of Hugging Face.

    The transform of `set_transform` runs on the rows as they are read. As
    `parse`, it must return the same for the same row: random operations belong
    in `augment`.

    Args:
        dataset: One split: a `datasets.Dataset`, or a streamed
            `datasets.IterableDataset`. A stream is read in its order, and a
            pipeline enters an epoch by reading up to the position; its own
            `shuffle` must have a seed, and a `map` that returns images or lists
            that may be empty must be given `features`.
        columns: List of strings, the columns to be read, of those that a
            transform returns if there is one; by default all.
        num_records: Integer, for a streamed dataset: the rows of an epoch, the
            first ones.

    Returns:
        A source of dicts from column to tensor, of the column's own dtype: a
        scalar; a vector for lists of numbers, which may differ in length; an
        array for arrays or images of any size. A missing number is 0 or NaN, a
        missing string "", a missing list empty. The result of a transform must
        have no missing values.

    Raises:
        TypeError: If it is no such dataset, or a column holds neither
            numbers, strings, arrays of numbers nor images.
        ValueError: If a column is missing, there is no row, a transform is
            random, or the number of streamed rows is not known.

    Example:

    >>> import datasets
    >>> table = datasets.Dataset.from_dict({"x": [1, 2], "y": ["a", "b"]})
    >>> source = hugging_face(table)
    >>> source.num_records
    2
    """
    if hasattr(dataset, "n_shards") and not hasattr(dataset, "__len__"):
        return _streamed(dataset, columns, num_records)
    _check(dataset, num_records)
    if dataset.format["type"] == "custom":
        leaves, read = _transformed_rows(dataset, columns)
    else:
        names = _checked(columns, dataset.column_names)
        tables = dataset.select_columns(names).with_format("arrow")
        leaves, of_table = _arrow_rows(
            names, tables.features, tables[:1], tables.data
        )

        def read(numbers):
            return of_table(tables[numbers], numbers)

    rows = _rows(leaves)

    def fetch(index):
        return rows.packed(read(index.tolist()).values())

    def mark():
        step = max(len(dataset) // _NUM_MARKED, 1)
        some = [a.tolist() for a in fetch(np.arange(0, len(dataset), step))]
        return repr((list(leaves), len(dataset), some)).encode()

    return IndexedSource(
        kind="hugging_face",
        num_records=len(dataset),
        gather=lambda index: from_python(fetch, index, rows.spec),
        identity=mark,
        decode=rows.decode,
        takes_batches=rows.takes_batches,
    )


def _check(dataset, num_records):
    at_random = hasattr(dataset, "__len__") and hasattr(dataset, "features")
    if isinstance(dataset, dict) or not at_random:
        raise TypeError(
            "`dataset` must be one split of a Hugging Face dataset. Received: "
            f"a {type(dataset).__name__}. Choose a split."
        )
    if num_records is not None:
        raise ValueError(
            "`num_records` is only for streamed datasets. Received: "
            f"num_records={num_records}. Use the dataset's `select`."
        )
    if not len(dataset):
        raise ValueError(
            "The dataset is empty: there is nothing to train on. Received: a "
            "`datasets.Dataset` without a row."
        )


def _checked(columns, there):
    names = list(dict.fromkeys(there if columns is None else columns))
    if isinstance(columns, str) or not names or set(names) - set(there):
        raise ValueError(
            "`columns` must be a list of columns of the dataset, at least one."
            f" Received: {columns!r}; there are {sorted(there)}."
        )
    return names


def _streamed(dataset, columns, num_records):
    import datasets

    tables = dataset.with_format("arrow")
    some = next(tables.iter(_NUM_STREAMED), None)
    if some is None:
        raise ValueError(
            "The dataset is empty: there is nothing to train on. Received: a "
            "`datasets.IterableDataset` without a row."
        )
    names = _checked(columns, some.column_names)
    some = some.select(names)
    # After a `map` it knows none: those of the first rows.
    features = dataset.features or datasets.Features.from_arrow_schema(
        some.schema
    )
    leaves, read = _arrow_rows(names, features, some.slice(0, 1), None)

    def generate():
        begin = 0
        for whole in tables.iter(_NUM_STREAMED):
            table = whole.select(names)
            if not table.schema.equals(some.schema):
                table = table.cast(some.schema)
            end = begin + table.num_rows
            columns = read(table, range(begin, end))
            yield from zip(*rows.packed(columns.values()), strict=True)
            begin = end

    rows = _rows(leaves)
    records = tf.data.Dataset.from_generator(
        generate, output_signature=rows.spec
    )
    source = stream_source.of_dataset(
        "hugging_face", records, num_records, rows.decode
    )
    return dataclasses.replace(source, takes_batches=rows.takes_batches)


def _rows(leaves):
    return RowFormat({(name,): leaf for name, leaf in leaves.items()})


def _arrow_rows(names, features, first, whole):
    """Columns of Arrow tables, and a function that reads them.

    `first` is a pyarrow table of the first row, `whole` of all rows, or None.
    The function takes a table and its rows' numbers, and returns a dict from
    column to values.
    """
    import datasets

    images = {
        name: features[name]
        for name in names
        if isinstance(features[name], datasets.Image) and features[name].decode
    }
    leaves = {}
    for name in names:
        if name in images:
            array = _image(name, images[name], first[name], 0)
            leaves[name] = _leaf_of_array(array)
        else:
            leaves[name] = _leaf(name, features[name], whole)

    def read(table, numbers):
        found = {}
        for name, leaf in leaves.items():
            if name not in images:
                found[name] = arrow_columns.values_of(
                    (name,), _stored(table[name]), leaf, numbers
                )
                continue
            arrays = [
                _image(name, images[name], table[name].slice(at, 1), number)
                for at, number in enumerate(numbers)
            ]
            found[name] = _serialized(name, arrays, leaf)
        return found

    return leaves, read


def _leaf(name, feature, whole):
    import datasets

    field = datasets.Features({name: feature}).arrow_schema.field(name)
    kind = getattr(field.type, "storage_type", field.type)
    inner, rank = arrow_columns.leaf_and_rank(kind)
    dtype = arrow_columns.dtype_of(inner)
    if dtype is None or (rank and dtype == tf.string):
        raise TypeError(
            "A column must hold numbers, strings, arrays of numbers or images."
            f" Received: {name!r} of {kind}. Leave it out of `columns`, or "
            "make it one with the dataset's `map`."
        )
    if not rank:
        return Leaf(dtype, (), 0)
    shape = None if whole is None else _shape_of_all(whole.column(name))
    return Leaf(dtype, shape, rank)


def _image(name, feature, column, number):
    value = column.to_pylist()[0]
    if value is None:
        raise ValueError(
            f"Every row must have an image. Received: column {name!r}, row "
            f"{number}, which has none. Remove such rows with the dataset's "
            "`filter`."
        )
    try:
        return np.asarray(feature.decode_example(value))
    except OSError as error:
        raise ValueError(
            f"An image cannot be decoded. Received: column {name!r}, row "
            f"{number}: {error}. Remove such rows with the dataset's `filter`."
        ) from error


def _stored(column):
    import pyarrow

    if isinstance(column.type, pyarrow.ExtensionType):
        return column.cast(column.type.storage_type)
    return column


def _shape_of_all(column):
    """The one shape of the lists of all rows, or None."""
    from pyarrow import compute

    column, shape = _stored(column), []
    while arrow_columns.is_list(column.type):
        lengths = compute.list_value_length(column)
        ends = compute.min_max(lengths).as_py()
        if lengths.null_count or not ends["max"] or ends["min"] != ends["max"]:
            return None
        shape.append(ends["max"])
        column = compute.list_flatten(column)
    return tuple(shape)


def _leaf_of_array(array):
    dtype = tf.string if array.dtype == object else tf.as_dtype(array.dtype)
    return Leaf(dtype, None if array.ndim else (), array.ndim)


def _serialized(name, arrays, leaf):
    """Arrays, which may differ in their sizes only, as bytes."""
    found = np.empty([len(arrays)], object)
    for row, array in enumerate(arrays):
        _check_like(name, array, leaf)
        found[row] = serialized(array, leaf.dtype)
    return found


def _check_like(name, array, leaf):
    """Refuses a value that differs from the first one of its column."""
    here = _leaf_of_array(array)
    is_number = not leaf.rank and not here.rank and leaf.dtype != tf.string
    dtype = leaf.dtype.as_numpy_dtype
    # Integers among floats are floats; the other way they would be rounded.
    if here != leaf and not (
        is_number and np.can_cast(array.dtype, dtype, "same_kind")
    ):
        raise ValueError(
            "Arrays of a column must have one dtype and number of dimensions. "
            f"Received: {name!r} with {here.dtype.name} of shape {array.shape} "
            f"after {leaf.rank} dimensions of {leaf.dtype.name}. Convert them "
            f"by the dataset's `map`, images by `cast_column({name!r}, "
            "datasets.Image(mode='RGB'))`."
        )


def _transformed_rows(dataset, columns):
    """`_arrow_rows`, for rows on which a transform runs."""
    tried = list(range(min(_NUM_TRIED, len(dataset))))
    names = _checked(columns, list(dataset[tried]))
    leaves = {}

    def read(numbers):
        batch, found = dataset[numbers], {}
        for name in names:
            arrays = [_array(name, value) for value in batch[name]]
            if len(arrays) != len(numbers):
                raise ValueError(
                    "A transform must return as many rows as it receives. "
                    f"Received: {len(arrays)} of {len(numbers)} in column "
                    f"{name!r}."
                )
            leaf = leaves.setdefault(name, _leaf_of_array(arrays[0]))
            if leaf.rank:
                found[name] = _serialized(name, arrays, leaf)
                continue
            for array in arrays:
                _check_like(name, array, leaf)
            values = [array.item() for array in arrays]
            found[name] = np.array(values, leaf.dtype.as_numpy_dtype)
        return found

    read(tried[:1])  # fills `leaves`
    once, again = (  # as text, in which NaN is itself
        repr([values.tolist() for values in read(tried).values()])
        for _ in range(2)
    )
    if once != again:
        raise ValueError(
            "A dataset's transform must be deterministic: its results may be "
            "cached, and a resumed run must see the same ones. Received: a "
            "random one. Move the random part to the pipeline's `augment`, "
            "and draw from its `seed`."
        )
    return leaves, read


def _array(name, value):
    array = np.asarray(value)
    if array.dtype.kind not in "biufUS":
        raise TypeError(
            "A transform must return numbers, strings, arrays of these or "
            f"images. Received: column {name!r} with a {type(value).__name__}"
            f" of dtype {array.dtype}."
        )
    if array.dtype.kind in "US":
        # Not NumPy's own strings: those lose zeros at their ends.
        return np.vectorize(tf.compat.as_bytes, otypes=[object])(
            np.asarray(value, object)
        )
    return array
