"""Whether records are parsed one by one or a batch at a time.

A record that goes through the chain by itself costs 20 to 50 microseconds
whatever is done to it, so small records are parsed in batches. `parse_batch` is
the user's own function of batches. Without it, `parse` is run on batches if
that is known to be the same (see `on_batches`). In either case some records are
parsed both ways, and must have the same bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain import on_batches
from tfscale.data.chain.recipe import Recipe
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource

FEW_RECORDS = 2048  # that are parsed sooner than it is found out how
_LARGE_BATCH = 4 << 20  # bytes: worth a core for each of its records
_TRIED = 16  # records


@dataclasses.dataclass(frozen=True)
class Decision:
    """How records are parsed.

    Attributes:
        function: Function of a batch of records as they are read, and of
            their `numbers`, that returns them parsed, or None.
        batchwise: Whether batches are parsed, or not parsed at all.
        reason: String, why.
    """

    function: Callable[..., Any] | None
    batchwise: bool
    reason: str


def decide(
    recipe: Recipe, parse_batch: Callable[..., Any] | None, raw: Any
) -> Decision:
    """Finds out how the records of a recipe are parsed.

    Args:
        recipe: `Recipe`; its `batchwise` and `parse_batch` are not looked at.
        parse_batch: Function of a batch that the user has written, or None.
        raw: Structure of eager tensors, the first record as it is read.

    Returns:
        A `Decision`.

    Raises:
        ValueError: If `parse_batch` does not return what `parse` does.
    """
    source = recipe.source
    if recipe.padding is not None:
        if parse_batch is not None:
            raise ValueError(
                "Records of several lengths are parsed one by one. Received: "
                "`padding` and `parse_batch`. Use `parse`."
            )
        return _no("batches are padded")
    if not _comes_in_batches(source):
        if parse_batch is not None:
            raise ValueError(
                "`parse_batch` is for sources whose records can be read a "
                "batch at a time: arrays, tokens, TFRecord, CSV and datasets "
                f"of fixed shapes. Received: {source.kind}. Use `parse`."
            )
        return _no(f"{source.kind} are read one by one")
    if parse_batch is not None:

        def asked(*batch, numbers):
            del numbers
            return parse_batch(*batch)

        _compare(recipe, asked)
        return Decision(asked, True, "as asked, with `parse_batch`")
    if recipe.parse is None:
        # What is augmented one by one is not put together before.
        return Decision(None, recipe.augment is None, "nothing is parsed")
    if source.num_records < FEW_RECORDS:
        return _no(f"there are fewer than {FEW_RECORDS}")
    if recipe.record_bytes() * recipe.plan.batch_size > _LARGE_BATCH:
        return _no("records are large")
    try:
        batched = on_batches.of_batches(recipe.parsed, raw)
        _compare(recipe, batched)
    except on_batches.NotKnownError as error:
        return _no(str(error))
    except (tf.errors.OpError, ValueError) as error:
        return _no(f"some records were tried in vain: {error}".split("\n")[0])
    return Decision(batched, True, "the same bits are found by batches")


def of_one(parse_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a batch, as one of a record."""

    def parse(*record):
        batch = keras.tree.map_structure(lambda t: t[tf.newaxis], record)
        return keras.tree.map_structure(lambda t: t[0], parse_batch(*batch))

    return parse


def _no(reason: str) -> Decision:
    return Decision(None, False, reason)


def _comes_in_batches(source: Any) -> bool:
    if source.decode is not None:
        return False
    if isinstance(source, IndexedSource):
        return source.gather is not None
    if isinstance(source, BlockSource):
        return True
    specs = tf.nest.flatten(source.dataset.element_spec)
    return all(
        isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined()
        for s in specs
    )


def _compare(recipe: Recipe, batched: Callable[..., Any]) -> None:
    """Refuses what does not give the bits that are given one by one."""
    records = recipe.source.sample(_TRIED)
    # A tuple is several arguments to `map`, and one record to `parsed`.
    parsed = records.map(lambda *r: recipe.parsed(r if len(r) > 1 else r[0]))
    want = next(iter(parsed.batch(_TRIED)))
    for size in (_TRIED, 3):  # nothing may depend on the batch
        parts = records.batch(size).map(
            lambda *b: batched(*b, numbers=tf.range(_TRIED, dtype=tf.int64))
        )
        found = [tf.nest.flatten(part) for part in parts]
        joined = [tf.concat(all_, 0) for all_ in zip(*found, strict=True)]
        keras.tree.assert_same_structure(want, parts.element_spec)
        for one, other in zip(tf.nest.flatten(want), joined, strict=True):
            if one.dtype != other.dtype or not _same(one, other):
                raise ValueError(
                    "A batch must be parsed to the records that `parse` "
                    "returns, bit for bit, along its first dimension. "
                    f"Received: {other.dtype.name} of shape {other.shape} "
                    f"where {one.dtype.name} of shape {one.shape} belongs, or "
                    "other values."
                )


def _same(one: tf.Tensor, other: tf.Tensor) -> bool:
    serialized = [tf.io.serialize_tensor(t).numpy() for t in (one, other)]
    return one.shape == other.shape and serialized[0] == serialized[1]
