"""The first record, which shows a pipeline the results of its functions."""

from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain.recipe import Recipe
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


def spec_of(recipe: Recipe, first: Any) -> Any:
    """Structure of `tf.TensorSpec`; with padding, None for sizes that differ.

    `first` is the first record, parsed.
    """
    if recipe.padding is None:
        return keras.tree.map_structure(tf.TensorSpec.from_tensor, first)
    known = recipe.map_parsed(recipe.source.sample(1)).element_spec
    return keras.tree.map_structure(_spec_of_any, known, first)


def _spec_of_any(known, first):
    shape = known.shape
    if shape.rank is None:
        shape = [None] * first.shape.rank
    return tf.TensorSpec(shape, first.dtype)
