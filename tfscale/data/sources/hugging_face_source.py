"""Rows of a Hugging Face dataset, read at random or as they are streamed."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import fetched_source
from tfscale.data.sources import stream_source
from tfscale.data.sources.hugging_face_rows import ArrayRows
from tfscale.data.sources.hugging_face_rows import ArrowRows
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import StreamSource

# Rows that are looked at to know a dataset again.
_NUM_MARKED = 256
_NUM_STREAMED = 32  # rows of a stream that are read at a time
_NUM_TRIED = 4  # rows that a transform is run on twice


def hugging_face(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    num_records: int | None = None,
) -> IndexedSource | StreamSource:
    """Records are the rows of a dataset of Hugging Face.

    The transform of `set_transform` is run on the rows as they are read. It
    must give the same of the same row, as `parse` must: what is random belongs
    in `augment`.

    Args:
        dataset: `datasets.Dataset`, or a streamed `datasets.IterableDataset`,
            one split. What is streamed is read in its order, and a pipeline
            enters an epoch by reading up to the position; its own `shuffle`
            must have a seed, and a `map` must be given `features`, where it
            returns images or lists that may be empty.
        columns: List of strings, the columns to be read, of those that a
            transform returns where there is one; by default all.
        num_records: Integer, of what is streamed: an epoch is its first so many
            rows.

    Returns:
        A source of dicts from column to tensor, of the column's own dtype: a
        scalar; a vector where it has lists of numbers, which may differ in
        length; an array where it has arrays or images, of any size. A missing
        number is 0 or NaN, a missing string "", a missing list empty. A
        transform must leave nothing missing.

    Raises:
        TypeError: If it is no such dataset, or a column holds neither
            numbers, strings, arrays of numbers nor images.
        ValueError: If a column is missing, there is no row, a transform is
            random, or nobody knows how many rows are streamed.

    Example:

    >>> import datasets
    >>> table = datasets.Dataset.from_dict({"x": [1, 2], "y": ["a", "b"]})
    >>> source = hugging_face(table)
    >>> source.num_records, source.decode(source.read(1))["y"].numpy()
    (2, b'b')
    """
    if _is_streamed(dataset):
        return _streamed(dataset, columns, num_records)
    _check(dataset, num_records)
    if dataset.format["type"] == "custom":
        names, fetch, decode = _transformed(dataset, columns)
    else:
        names = _checked(columns, dataset.column_names)
        tables = dataset.select_columns(names).with_format("arrow")
        rows = ArrowRows(names, tables.features, tables[:1], tables.data)
        decode = rows.decode

        def fetch(index):
            numbers = index.tolist()
            return rows.rows(tables[numbers], numbers)

    def mark():
        """What a cache knows the rows by: how many, and some all over them."""
        step = max(len(dataset) // _NUM_MARKED, 1)
        some = fetch(np.arange(0, len(dataset), step))
        return repr((names, len(dataset), some)).encode()

    return fetched_source.fetched(
        "hugging_face", len(dataset), fetch, mark, decode=decode
    )


def _is_streamed(dataset):
    return hasattr(dataset, "n_shards") and not hasattr(dataset, "__len__")


def _check(dataset, num_records):
    at_random = hasattr(dataset, "__len__") and hasattr(dataset, "features")
    if isinstance(dataset, dict) or not at_random:
        raise TypeError(
            "`dataset` must be one split of a dataset of Hugging Face. "
            f"Received: a {type(dataset).__name__}. Choose a split."
        )
    if num_records is not None:
        raise ValueError(
            "`num_records` is for what is streamed: of others all rows are "
            f"read. Received: num_records={num_records}. Use the dataset's "
            "`select`."
        )
    if not len(dataset):
        raise ValueError(
            "The dataset is empty: there is nothing to train on. Received: a "
            "`datasets.Dataset` without a row."
        )


def _checked(columns, there):
    """Names of the columns to be read."""
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
    rows = ArrowRows(names, features, some.slice(0, 1), None)

    def generate():
        begin = 0
        for whole in tables.iter(_NUM_STREAMED):
            table = whole.select(names)
            if not table.schema.equals(some.schema):
                table = table.cast(some.schema)
            end = begin + table.num_rows
            yield from rows.rows(table, range(begin, end))
            begin = end

    records = tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([], tf.string)
    )
    return stream_source.of_dataset(
        "hugging_face", records, num_records, rows.decode
    )


def _transformed(
    dataset: Any, columns: Sequence[str] | None
) -> tuple[list[str], Callable[..., Any], Callable[..., Any]]:
    """Names, and the functions of rows that a transform is run on."""
    tried = list(range(min(_NUM_TRIED, len(dataset))))
    names = _checked(columns, list(dataset[tried]))

    def parts(numbers):
        import pyarrow

        batch, plain, arrays = dataset[numbers], {}, {}
        for name in names:
            values = list(batch[name])
            if len(values) != len(numbers):
                raise ValueError(
                    "A transform must return as many rows as it is given. "
                    f"Received: {len(values)} of {len(numbers)} in column "
                    f"{name!r}."
                )
            found = [_array(name, value) for value in values]
            if found[0].dtype.kind in "US":
                plain[name] = pyarrow.array(
                    # Not NumPy's scalars: those lose zeros at their ends.
                    [a.tolist() for a in found] if found[0].ndim else values
                )
            elif found[0].ndim == 0:
                plain[name] = pyarrow.array(np.stack(found))
            else:
                arrays[name] = found
        return pyarrow.table(plain), arrays

    table, first = parts(tried[:1])
    rows = ArrayRows(names, table, first, {})

    def fetch(index):
        return rows.rows(*parts(index.tolist()))

    if fetch(np.array(tried)) != fetch(np.array(tried)):
        raise ValueError(
            "A dataset's transform must give the same of the same row: it may "
            "be cached, and a resumed run must see the same. Received: one "
            "that is random. Move what is random to the pipeline's `augment`, "
            "and draw from its `seed`."
        )
    return names, fetch, rows.decode


def _array(name, value):
    array = np.asarray(value)
    if array.dtype.kind not in "biufUS":
        raise TypeError(
            "A transform must return numbers, strings, arrays of these or "
            f"images. Received: column {name!r} with a {type(value).__name__}"
            f" of dtype {array.dtype}."
        )
    return array
