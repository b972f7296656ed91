"""Shuffled records from a source that can only be read in its own order."""

import tensorflow as tf

from tfscale.data.order import stream

_MIX = 0x5EED  # makes this order differ from that of blocks


def stream_records(recipe, begin):
    """A dataset of keys and records of a `StreamSource`, in order.

    The order is that of a shuffle buffer whose seed is a function of (seed,
    epoch). An iterator reads up to its position before any costly map.
    """
    source, plan = recipe.source, recipe.plan

    @tf.autograph.experimental.do_not_convert
    def epoch_of(where):
        start = where.first
        records = source.dataset.enumerate()
        if recipe.shuffle:
            key = tf.stack([where.seed, where.epoch])
            key = tf.random.experimental.stateless_fold_in(key, _MIX)
            records = _shuffled(records, recipe.window, key)
        end = plan.global_batch * where.steps + start
        padding = tf.maximum(end - plan.num_records, 0)
        if plan.remainder == "pad":
            records = records.concatenate(
                source.dataset.enumerate().repeat().take(padding)
            )
        records = records.enumerate().skip(start)

        if plan.num_workers > 1:
            records = records.filter(
                lambda position, _: stream.of_worker(plan, position, where)
            )
        else:
            records = records.take(where.final + 1 - start)

        def keyed(position, record):
            number, raw = record
            return tf.stack([where.seed, where.epoch, number, position]), raw

        return records.map(keyed)

    @tf.autograph.experimental.do_not_convert
    def position(_):
        return begin(plan)

    head = tf.data.Dataset.from_tensors(0).map(position, name="position")
    return head.flat_map(epoch_of)


def _shuffled(records, window, key):
    """`records.shuffle`, with a seed that is a tensor.

    `Dataset.shuffle` would also use the seed of `tf.random.set_seed`, so the
    order would not be a function of the position.
    """
    specs = tf.nest.flatten(records.element_spec)
    plain = [isinstance(spec, tf.TensorSpec) for spec in specs]
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(records),
        buffer_size=tf.constant(window, tf.int64),
        seed=tf.cast(key[0], tf.int64),
        seed2=tf.cast(key[1], tf.int64),
        # Ragged and sparse tensors travel as variants.
        output_types=[
            spec.dtype if one else tf.variant for spec, one in zip(specs, plain)
        ],
        output_shapes=[
            spec.shape if one else tf.TensorShape(None)
            for spec, one in zip(specs, plain)
        ],
        reshuffle_each_iteration=False,
    )
    return tf.data.experimental.from_variant(variant, records.element_spec)
