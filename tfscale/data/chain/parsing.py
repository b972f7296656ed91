"""Whether records are parsed one by one or a batch at a time.

A single record costs 20 to 50 microseconds in the chain, whatever its `parse`
does, so batches of small records are parsed 7 to 11 times faster: by the user's
`parse_batch`, or by `parse` if it can run on batches (see `batchwise`). Some
records are parsed both ways first, and must have the same bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain import batchwise
from tfscale.data.chain.recipe import Recipe
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource

FEW_RECORDS = 2048  # are parsed before two ways could be compared
_LARGE_BATCH = 4 << 20  # bytes: worth a core for each record
_TRIED = 16  # records


def decided(
    recipe: Recipe, parse_batch: Callable[..., Any] | None, raw: Any
) -> Recipe:
    """The recipe with its way of parsing; `raw` is the first record as read."""

    def chosen(reason, function=None, in_batches=False):
        return dataclasses.replace(
            recipe,
            parse_batch=function,
            batchwise=in_batches,
            parse_reason=reason,
        )

    source = recipe.source
    if recipe.padding is not None:
        if parse_batch is not None:
            raise ValueError(
                "Records of several lengths are parsed one by one. Received: "
                "`padding` and `parse_batch`. Use `parse`."
            )
        return chosen("batches are padded")
    if not _comes_in_batches(source):
        if parse_batch is not None:
            raise ValueError(
                "`parse_batch` is for sources whose records can be read a "
                "batch at a time: arrays, tokens, TFRecord, CSV and datasets "
                f"of fixed shapes. Received: {source.kind}. Use `parse`."
            )
        return chosen(f"{source.kind} are read one by one")
    if parse_batch is not None:

        def asked(*batch, numbers):
            del numbers
            return parse_batch(*batch)

        _compare(recipe, asked)
        return chosen("as asked, with `parse_batch`", asked, True)
    if recipe.parse is None:
        # Records that are augmented one by one are not batched before.
        return chosen("nothing is parsed", None, recipe.augment is None)
    if source.num_records < FEW_RECORDS:
        return chosen(f"there are fewer than {FEW_RECORDS}")
    if recipe.record_bytes() * recipe.plan.batch_size > _LARGE_BATCH:
        return chosen("records are large")
    try:
        batched = batchwise.on_batches(recipe.parsed, raw)
        _compare(recipe, batched)
    except batchwise.NotOnBatchesError as error:
        return chosen(str(error))
    except (tf.errors.OpError, ValueError) as error:
        reason = f"some records failed when they were tried: {error}"
        return chosen(reason.split("\n")[0])
    return chosen("the same bits are found by batches", batched, True)


def of_one(parse_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a record that calls a function of a batch."""

    def parse(*record):
        batch = keras.tree.map_structure(lambda t: t[tf.newaxis], record)
        return keras.tree.map_structure(lambda t: t[0], parse_batch(*batch))

    return parse


def _comes_in_batches(source):
    if source.decode is not None:
        return False
    if isinstance(source, IndexedSource):
        return source.gather is not None
    return isinstance(source, BlockSource) or all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        for spec in tf.nest.flatten(source.dataset.element_spec)
    )


def _compare(recipe, batched):
    records = recipe.source.sample(_TRIED)
    want = next(iter(recipe.map_parsed(records).batch(_TRIED)))
    for size in (_TRIED, 3):  # nothing may depend on the batch
        batches = records.batch(size).map(
            lambda *b: batched(*b, numbers=tf.range(_TRIED, dtype=tf.int64))
        )
        keras.tree.assert_same_structure(want, batches.element_spec)
        found = zip(*map(tf.nest.flatten, batches), strict=True)
        for one, tensors in zip(tf.nest.flatten(want), found, strict=True):
            other = tf.concat(tensors, 0)
            if one.shape != other.shape or _bits(one) != _bits(other):
                raise ValueError(
                    "A batch must be parsed to the records that `parse` "
                    "returns, bit for bit, along its first dimension. "
                    f"Received: {other.dtype.name} of shape {other.shape} "
                    f"where {one.dtype.name} of shape {one.shape} belongs, or "
                    "other values."
                )


def _bits(tensor):
    return tf.io.serialize_tensor(tensor).numpy()
