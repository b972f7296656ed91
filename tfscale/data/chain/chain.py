"""The chain of steps from records to batches, the same for every source.

    order      (seed, epoch, index) -> record numbers    for `shuffle`, `shard`
    read       parallel, AUTOTUNE
    parse      deterministic, so it can be cached
    cache      by record number; never random values
    augment    random, from (seed, epoch, record)
    batch      and the remainder
    prefetch   AUTOTUNE, so that training does not wait for the other steps

If records can be parsed in batches (see `parsing`), reading, parsing and
caching are one parallel map of batches. Otherwise they and augmentation are one
parallel map of records: each map of records costs 10 to 30 microseconds, and
one number is easier to tune.
"""

import functools

import keras
import tensorflow as tf

from tfscale.data import single_device
from tfscale.data.chain import named
from tfscale.data.chain import recipe as recipe_lib
from tfscale.data.order import buffered
from tfscale.data.order import stream
from tfscale.data.order import windows
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource


def build(recipe, position):
    """The chain of one worker, as a plain `tf.data.Dataset` of batches."""
    batches = keyed_batches(recipe, position)
    if recipe.prefetch:
        batches = batches.prefetch(recipe.prefetch)
    # Else tf.data makes it parallel, and it would read ahead.
    delivered = single_device.map_on_host(
        batches, _deliver(recipe), name="deliver", synchronous=True
    )
    return delivered.with_options(recipe.options)


def keyed_batches(recipe, position):
    """The chain up to prefetching: a dataset of `(keys, batch)`."""
    if not recipe.batchwise:
        records = keyed_records(recipe.quickest(), position)
        if not recipe.names_failed:
            return _batched(recipe, records)
        return named.batches(
            _batched(recipe, records.ignore_errors()),
            # It is read first, and the other moves the position.
            _raw_batches(recipe, position.start),
            functools.partial(made, recipe),
        )
    batches = _parsed_batches(recipe, position)
    if recipe.augment is None:
        return batches
    # The number of a whole epoch: see `stream`.
    size = recipe.plan.batch_size
    records = batches.map(lambda *b: stream.declare(b, size)).unbatch()
    augmented = records.map(
        lambda key, record: (key, _augment(recipe, key, record)),
        **recipe.parallel(),
        name="augment",
    )
    return _batched(recipe, augmented)


def keyed_records(recipe, position):
    """The chain up to batches: a dataset of `(key, record)`."""
    return _raw_records(recipe, position.begin).map(
        lambda key, raw=None: (key, made(recipe, key, raw)),
        **recipe.parallel(),
        name="record",
    )


def _raw_records(recipe, begin):
    if isinstance(recipe.source, IndexedSource):
        return stream.indexed_keys(recipe, begin).unbatch()
    if isinstance(recipe.source, BlockSource):
        return windows.block_records(recipe, begin)
    return buffered.stream_records(recipe, begin)


def _parsed_batches(recipe, position):
    gathered = isinstance(recipe.source, IndexedSource)

    def work(keys, *raw):
        if recipe.plan.remainder == "keep":
            if isinstance(recipe.source, BlockSource):
                keys, *raw = stream.whole(keys, *raw)
            else:
                keys = stream.undeclared(keys)
        index = keys[:, stream.RECORD]

        def make():
            batch = recipe.source.gather(index) if gathered else raw[0]
            if recipe.cache is None or recipe.parse_batch is None:
                return recipe.parsed_batch(batch)
            # A map of its own is prepared only for records not cached.
            one = tf.data.Dataset.from_tensors(batch)
            parsed = recipe_lib.mapped(one, recipe.parsed_batch)
            return parsed.get_single_element()

        return keys, recipe.get_or_make(index, make)

    batches = _raw_batches(recipe, position.begin)
    # Grappler changes bits of a user's function (a quotient by a constant
    # becomes a product), here as in a map of single records.
    if recipe.parse_batch is not None and recipe.cache is None:
        return batches.map(work, **recipe.parallel(), name="record")
    return single_device.map_on_host(
        batches, work, **recipe.parallel(), name="record"
    )


def _raw_batches(recipe, begin):
    plan = recipe.plan
    if isinstance(recipe.source, BlockSource):
        return windows.block_batches(recipe, begin)
    if not isinstance(recipe.source, IndexedSource):
        return _batched(recipe, buffered.stream_records(recipe, begin))
    batches = stream.indexed_keys(recipe, begin)
    if plan.batches_per_step > 1:
        shape = [plan.batches_per_step, plan.batch_size, stream.KEY_SIZE]
        batches = batches.map(lambda k: tf.reshape(k, shape)).unbatch()
    return batches


def _augment(recipe, key, record):
    seed = tf.random.experimental.stateless_fold_in(
        key[stream.SEED_AND_EPOCH], key[stream.RECORD]
    )
    return recipe_lib.call(recipe.augment, record, seed=seed)


def made(recipe, key, raw=None):
    """A record: read and parsed, or from the cache, then augmented."""
    index = key[stream.RECORD]

    def make():
        record = recipe.source.read(index) if raw is None else raw
        return recipe.checked(index, recipe.parsed(record))

    record = recipe.get_or_make(index, make)
    if recipe.augment is None:
        return record
    return _augment(recipe, key, record)


def _batched(recipe, records):
    size, whole = recipe.plan.batch_size, recipe.plan.remainder != "keep"
    if recipe.padding is None:
        return records.batch(size, drop_remainder=whole)
    key, record = records.element_spec
    values = (tf.zeros([], key.dtype), _padding(recipe.padding, record))
    return records.padded_batch(
        size, padding_values=values, drop_remainder=whole
    )


def _padding(padding, record):
    """The value with which each component of a record is padded."""
    if not keras.tree.is_nested(padding):
        number = padding  # one for all components is none for strings
        padding = keras.tree.map_structure(
            lambda spec: "" if spec.dtype == tf.string else number, record
        )
    try:
        keras.tree.assert_same_structure(record, padding)
    except ValueError as error:
        raise ValueError(
            "`padding` must be a number, or have the structure of a record. "
            f"Received: padding={padding!r} for records {record}."
        ) from error
    return keras.tree.map_structure(
        lambda spec, value: _padding_value(value, spec), record, padding
    )


def _padding_value(value, spec):
    if spec.shape.rank is not None and spec.shape.is_fully_defined():
        return tf.zeros([], spec.dtype)  # never used
    try:
        found = tf.constant(
            bool(value) if spec.dtype == tf.bool else value, spec.dtype
        )
        if spec.dtype.is_integer and tf.get_static_value(found) != value:
            raise ValueError(f"It would be {tf.get_static_value(found)}.")
        return found
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`padding` must match the dtype of the padded component. "
            f"Received: {value!r} for {spec.dtype.name} of shape {spec.shape}. "
            "Pass a structure like a record, with a value for each component."
        ) from error


def _deliver(recipe):
    """The last map: a batch without its keys, with weights of padding."""

    def deliver(key, batch):
        if recipe.plan.remainder != "pad":
            return batch
        is_real = key[:, stream.POSITION] < recipe.plan.num_records
        return _weighted(batch, tf.cast(is_real, tf.float32))

    return deliver


def _weighted(batch, real):
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise ValueError(
            "remainder='pad' needs records (x, y) or (x, y, sample_weight), "
            f"because padding has weight 0. Received: {batch}. Use "
            "remainder='drop' or 'keep', or return (x, y) from `parse`."
        )
    x, y, *weights = batch
    if not weights:
        return x, y, real

    def masked(weight):
        of_rows = tf.reshape(real, [-1, *[1] * (weight.shape.rank - 1)])
        return weight * tf.cast(of_rows, weight.dtype)

    return x, y, keras.tree.map_structure(masked, weights[0])
