"""Any `tf.data.Dataset` as a source."""

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.data.sources.source import StreamSource


def dataset(
    records: tf.data.Dataset, *, num_records: int | None = None
) -> StreamSource:
    """Records are the elements of a `tf.data.Dataset`.

    Keep the dataset cheap: the pipeline enters an epoch by reading up to the
    position, so costly operations belong in `parse`.

    Args:
        records: `tf.data.Dataset` of single records, not batches, that gives
            the same ones in the same order whenever it is iterated.
        num_records: Integer, the number of elements of an epoch, if the
            dataset does not know it. If there are fewer, reading fails when
            the dataset ends.

    Returns:
        A source of its elements.

    Raises:
        TypeError: If it is no `tf.data.Dataset`.
        ValueError: If the number of records is not known, or there are fewer.

    Example:

    >>> dataset(tf.data.Dataset.range(10)).num_records
    10
    """
    if not isinstance(records, tf.data.Dataset):
        raise TypeError(
            "`records` must be a `tf.data.Dataset`. Received: a "
            f"{type(records).__name__}. Use `tfscale.data.arrays` for data in "
            "memory, `tf.data.Dataset.from_generator` for a generator."
        )
    return of_dataset("dataset", records, num_records)


def tfds(
    name: str,
    split: Any,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    as_supervised: bool = True,
    read_config: Any = None,
) -> StreamSource:
    """Records of a dataset of tensorflow-datasets, by its name.

    Images stay encoded until the pipeline's parallel map decodes them.

    Args:
        name: String, `"cifar10"` or `"mnist:3.0.1"` for instance.
        split: String, `"train"` or `"train[:80%]"` for instance, or a
            `tfds.core.ReadInstruction`.
        data_dir: String, where `tfds` keeps its data, or None for its default.
        as_supervised: Whether records are `(x, y)`, or dicts of all features.
        read_config: `tfds.ReadConfig`; its order of files must not be random.

    Returns:
        A source of the records. It is downloaded first if it is not there.

    Raises:
        ValueError: If it is not one split, or already divided among workers.

    Example:

    >>> import tensorflow_datasets
    >>> with tensorflow_datasets.testing.mock_data(num_examples=5):
    ...     tfds("mnist", "train").num_records
    5
    """
    if split is None or isinstance(split, list | tuple | dict):
        raise ValueError(
            "`split` must be one split; a union is written with a plus. "
            f'Received: split={split!r}. Use, for example, "train" or '
            '"train+test", and a source for each split.'
        )
    if read_config is not None and read_config.input_context is not None:
        raise ValueError(
            "`read_config` must not divide records among workers; a pipeline "
            "does. Received: a `read_config` with an `input_context`. Pass "
            "that to `tfscale.data.pipeline`."
        )
    import tensorflow_datasets  # imported here, because it takes seconds

    builder = tensorflow_datasets.builder(name, data_dir=data_dir)
    builder.download_and_prepare()
    skip = tensorflow_datasets.decode.SkipDecoding()
    features = builder.info.features
    images = {
        key: feature
        for key, feature in features.items()
        if isinstance(feature, tensorflow_datasets.features.Image)
    }

    def decoded(keys, values):
        return [
            images[key].decode_example(value) if key in images else value
            for key, value in zip(keys, values, strict=True)
        ]

    def decode(*record):
        if as_supervised:
            return tuple(decoded(builder.info.supervised_keys, record))
        (values,) = record
        return dict(zip(values, decoded(values, values.values())))

    records = builder.as_dataset(
        split=split,
        as_supervised=as_supervised,
        shuffle_files=False,
        decoders=dict.fromkeys(images, skip),
        read_config=read_config,
    )
    return of_dataset(f"tfds {name}", records, None, decode)


def of_dataset(
    kind: str,
    records: tf.data.Dataset,
    num_records: int | None,
    decode: Callable[..., Any] | None = None,
) -> StreamSource:
    """A source of a dataset's elements, which are finitely many.

    `num_records` is as of `dataset`, and the rest as in `StreamSource`.
    """
    known = int(records.cardinality())
    if num_records is None:
        num_records = known
        if known < 0:
            raise ValueError(
                "A pipeline needs a known, finite number of records in an "
                f"epoch. Received: {kind} of cardinality {known} (-1 is "
                "infinite, -2 is unknown). Pass `num_records`, or remove "
                "`repeat`."
            )
    elif num_records < 1 or 0 <= known < num_records:
        raise ValueError(
            "`num_records` must be from 1 to the number of records. Received: "
            f"num_records={num_records}, {kind} of cardinality {known}."
        )
    elif known != num_records:  # reading fails at the end of fewer
        count = tf.data.experimental.assert_cardinality(num_records)
        records = records.take(num_records).apply(count)
    return StreamSource(
        kind=kind, num_records=num_records, dataset=records, decode=decode
    )
