"""Whether records are parsed one by one or a batch at a time.

A record that goes through the chain by itself costs 20 to 50 microseconds
whatever is done to it, so small records are parsed in batches. That must not be
visible: what is done to a batch is either known to give the bits that are given
record by record, and tried on some records, or was written by the user, and is
tried just the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain import recipe as recipe_lib
from tfscale.data.chain import vectorize
from tfscale.data.chain.recipe import Recipe
from tfscale.data.order import order
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
    functions = [f for f in (source.decode, recipe.parse) if f is not None]
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
    if not functions and parse_batch is None:
        if recipe.augment is not None and source.num_records < FEW_RECORDS:
            return _no("nothing is parsed")
        return Decision(None, True, "nothing is parsed")
    if parse_batch is not None:
        batched = _after_source(source, parse_batch, raw)
        _compare(recipe, batched)
        return Decision(batched, True, "as asked, with `parse_batch`")
    if source.num_records < FEW_RECORDS:
        return _no(f"there are fewer than {FEW_RECORDS}")
    if recipe.record_bytes() * recipe.plan.batch_size > _LARGE_BATCH:
        return _no("records are large")
    try:
        batched = _vectorized(recipe.parsed, raw)
        _compare(recipe, batched)
    except vectorize.NotExactError as error:
        return _no(_without_trace(error))
    except (tf.errors.OpError, ValueError) as error:
        return _no(_in_vain(error))
    return Decision(batched, True, "the same bits are found by batches")


def decide_augment(recipe: Recipe) -> Decision:
    """Finds out how the records of a recipe that are parsed are augmented.

    Args:
        recipe: `Recipe`, whose `augment` is not None.

    Returns:
        A `Decision`, whose function takes a batch of parsed records and their
        seeds, an int64 tensor of shape `(batch, 2)`.
    """
    if not recipe.batchwise:
        return _no("they are not parsed by batches")
    if recipe.source.num_records < FEW_RECORDS:
        return _no(f"there are fewer than {FEW_RECORDS}")

    def of_parts(seed, *parts):
        record = tf.nest.pack_sequence_as(recipe.spec, parts)
        return recipe_lib.call(recipe.augment, record, seed=seed)

    seed = tf.TensorSpec([2], tf.int64)
    try:
        batched = vectorize.vectorized(
            of_parts, [seed, *tf.nest.flatten(recipe.spec)]
        )

        def of_batch(batch, seeds):
            return batched(seeds, *tf.nest.flatten(batch), numbers=seeds[:, 1])

        _compare_augmented(recipe, of_batch)
    except vectorize.NotExactError as error:
        return _no(_without_trace(error))
    except (tf.errors.OpError, ValueError) as error:
        return _no(_in_vain(error))
    return Decision(of_batch, True, "the same bits are found by batches")


def _compare_augmented(recipe, of_batch):
    parsed = recipe.source.sample(_TRIED).map(
        lambda *r: recipe.parsed(r if len(r) > 1 else r[0])
    )
    numbers = tf.range(_TRIED, dtype=tf.int64)
    records = tf.data.Dataset.zip(
        tf.data.Dataset.from_tensor_slices(numbers), parsed
    )
    epoch = tf.constant(1, tf.int64)

    def of_one(number, record):
        seed = order.augmentation_seed(0, epoch, number)
        return recipe_lib.call(recipe.augment, record, seed=seed)

    @tf.autograph.experimental.do_not_convert
    def of_some(numbers, batch):
        return of_batch(batch, order.augmentation_seeds(0, epoch, numbers))

    _must_agree(records, of_one, of_some)


def _without_trace(error):
    """AutoGraph puts the lines before it that it went through."""
    return str(error).rpartition("NotExactError: ")[2].strip()


def _in_vain(error):
    return f"some records were tried in vain: {error}".split("\n")[0]


def of_one(parse_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a batch, as one of a record."""

    def parse(*record):
        batch = keras.tree.map_structure(lambda t: t[tf.newaxis], record)
        return keras.tree.map_structure(lambda t: t[0], parse_batch(*batch))

    return parse


def _no(reason: str) -> Decision:
    return Decision(None, False, reason)


def _comes_in_batches(source: Any) -> bool:
    if isinstance(source, IndexedSource):
        return source.gather is not None
    if isinstance(source, BlockSource):
        return True
    specs = tf.nest.flatten(source.dataset.element_spec)
    return all(
        isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined()
        for s in specs
    )


def _vectorized(function: Callable[[Any], Any], raw: Any) -> Callable[..., Any]:
    """A function of a record like `raw`, as one of batches of such."""

    def of_parts(*parts):
        return function(tf.nest.pack_sequence_as(raw, parts))

    batched = vectorize.vectorized(
        of_parts, [tf.TensorSpec.from_tensor(t) for t in tf.nest.flatten(raw)]
    )
    return lambda *batch, numbers: batched(
        *tf.nest.flatten(batch), numbers=numbers
    )


def _after_source(
    source: Any, parse_batch: Callable[..., Any], raw: Any
) -> Callable[..., Any]:
    """`parse_batch`, behind what the source itself does to its records."""
    if source.decode is None:
        return lambda *batch, numbers: parse_batch(*batch)
    decode = _vectorized(functools.partial(recipe_lib.call, source.decode), raw)
    return lambda *batch, numbers: recipe_lib.call(
        parse_batch, decode(*batch, numbers=numbers)
    )


def _compare(recipe: Recipe, batched: Callable[..., Any]) -> None:
    """Refuses what does not give the bits that are given one by one."""
    records = recipe.source.sample(_TRIED)

    def of_batch(*batch):
        numbers = tf.range(_TRIED, dtype=tf.int64)
        return batched(*batch, numbers=numbers)

    # A tuple is several arguments to `map`, and one record to `parsed`.
    _must_agree(
        records, lambda *r: recipe.parsed(r if len(r) > 1 else r[0]), of_batch
    )


def _must_agree(records, of_one, of_batch):
    want = next(iter(records.map(of_one).batch(_TRIED)))
    for size in (_TRIED, 3):  # nothing may depend on the batch
        parts = records.batch(size).map(of_batch)
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
    if one.shape != other.shape:
        return False
    return (
        tf.io.serialize_tensor(one).numpy()
        == tf.io.serialize_tensor(other).numpy()
    )
