"""Whether records are parsed one by one or a batch at a time.

A single record costs 20 to 50 microseconds in the chain, whatever its `parse`
does, so batches of small records are parsed 7 to 11 times faster, by the user's
`parse_batch`. Some records are parsed both ways first, and must have the same
bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain.recipe import Recipe
from tfscale.data.chain.recipe import call
from tfscale.data.chain.recipe import mapped
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource

_TRIED = 16  # records


def decided(recipe: Recipe, parse_batch: Callable[..., Any] | None) -> Recipe:
    """The recipe with its way of parsing."""
    source = recipe.source
    if parse_batch is not None:
        if recipe.padding is not None:
            raise ValueError(
                "`parse_batch` cannot be used with `padding`, because records "
                "of several lengths are parsed one by one. Received: both. "
                "Use `parse`."
            )
        if not _comes_in_batches(source):
            raise ValueError(
                "`parse_batch` needs a source that can be read in batches: "
                "arrays, tokens, TFRecord, CSV and datasets of fixed shapes. "
                f"Received: {source.kind}. Use `parse`."
            )
        _compare(recipe, parse_batch)
        return dataclasses.replace(
            recipe,
            parse_batch=parse_batch,
            batchwise=True,
            parse_reason="as asked, with `parse_batch`",
        )
    if recipe.padding is not None:
        reason = "batches are padded"
    elif not _comes_in_batches(source):
        reason = f"{source.kind} are read one by one"
    elif recipe.parse is not None:
        reason = "`parse_batch` would parse a batch at a time"
    else:
        # Records that are augmented one by one are not batched before.
        return dataclasses.replace(
            recipe,
            batchwise=recipe.augment is None,
            parse_reason="nothing is parsed",
        )
    return dataclasses.replace(recipe, parse_reason=reason)


def of_one(parse_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a record that calls a function of a batch."""

    def parse(*record):
        batch = keras.tree.map_structure(lambda t: t[tf.newaxis], record)
        return keras.tree.map_structure(lambda t: t[0], parse_batch(*batch))

    return parse


def _comes_in_batches(source):
    if source.decode is not None and not source.takes_batches:
        return False
    if isinstance(source, IndexedSource):
        return source.gather is not None
    return isinstance(source, BlockSource) or all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        for spec in tf.nest.flatten(source.dataset.element_spec)
    )


def _compare(recipe, parse_batch):
    records = recipe.source.sample(_TRIED)
    want = next(iter(recipe.map_parsed(records).batch(_TRIED)))
    for size in (_TRIED, 3):  # nothing may depend on the batch
        batches = mapped(
            records.batch(size),
            lambda batch: call(parse_batch, recipe.decoded(batch)),
        )
        keras.tree.assert_same_structure(want, batches.element_spec)
        found = zip(*map(tf.nest.flatten, batches), strict=True)
        for one, tensors in zip(tf.nest.flatten(want), found, strict=True):
            other = tf.concat(tensors, 0)
            if one.shape != other.shape or _bits(one) != _bits(other):
                raise ValueError(
                    "`parse_batch` must return the records of `parse`, bit "
                    "for bit, along its first dimension. Received: "
                    f"{other.dtype.name} of shape {other.shape} for "
                    f"{one.dtype.name} of shape {one.shape}, or other values."
                )


def _bits(tensor):
    return tf.io.serialize_tensor(tensor).numpy()
