"""The first record, which shows a pipeline the results of its functions."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.sources.source import Source


def read(source: Source) -> Any:
    """The first record of a source, unparsed.

    Raises:
        ValueError: If there is none.
    """
    if source.num_records == 0:
        raise ValueError(
            "The dataset is empty: there is nothing to train on. "
            f"Received: {source.kind} without a record."
        )
    try:
        return source.first()
    except StopIteration:
        raise ValueError(
            "The dataset is empty: there is nothing to train on. Received: "
            f"{source.kind} that ends before its first record, where "
            f"{source.num_records} were promised."
        ) from None


def only_element(dataset: tf.data.Dataset) -> Any:
    """The only element of a dataset, a parsed record of eager tensors.

    Raises:
        TypeError: If it is no structure of dense tensors.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if not specs or not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise TypeError(
            "A record must be a structure of dense tensors after `parse`. "
            f"Received: {dataset.element_spec}. Return something from `parse`,"
            " and make what is ragged or sparse dense there, with "
            "`to_tensor(shape=...)` or `tf.sparse.to_dense`."
        )
    return dataset.get_single_element()


def spec_of_any(
    source: Source, functions: Sequence[Callable[..., Any]], first: Any
) -> Any:
    """Structure of `tf.TensorSpec`, with None for sizes that may differ.

    `first` is the first record, parsed.
    """
    known = mapped(source.sample(1), functions).element_spec
    return keras.tree.map_structure(_spec_of_any, known, first)


def _spec_of_any(known, first):
    shape = known.shape
    if shape.rank is None:
        shape = [None] * first.shape.rank
    return tf.TensorSpec(shape, first.dtype)


def mapped(
    dataset: tf.data.Dataset, functions: Sequence[Callable[..., Any]]
) -> tf.data.Dataset:
    """Records after functions, one after the other."""
    for function in functions:
        dataset = dataset.map(functools.partial(_returning, function))
    return dataset


def _returning(function, *record):
    result = function(*record)
    if result is None:
        raise TypeError(
            "`parse` must return the parsed record. Received: None. Is there a "
            "`return`?"
        )
    return result
