"""From a source and a plan to a stream of keyed records, in order.

A key has four int64 numbers, which follow a record to the end of the chain:

    0 seed    1 epoch        of the record
    2 record  3 position     its number in the source, and in the epoch

A record whose position is after all records of the source pads the last batch.

**Order.** `tf.random.experimental.index_shuffle` is a keyed permutation of 0 to
n - 1, evaluated at one position at a time. So the order needs no buffer, is the
same on every worker, and can be entered anywhere.

**Cardinality.** Each iterator computes the number of elements from the
position, but tf.data must know it when the dataset is created. For `unbatch` it
is the number of elements times their static first dimension: `declare` gives a
vector the length that it has in a whole epoch. Nothing checks a static shape at
run time, so a resumed epoch is simply shorter.

**Few operations.** Each iterator prepares every function of the chain again.
Our functions are marked for one device (see `single_device`) and run as
written, so they are short.
"""

import keras
import tensorflow as tf

from tfscale.data import single_device
from tfscale.data.order.epoch_plan import EpochStart

KEY_SIZE = 4
SEED_AND_EPOCH, RECORD, POSITION = slice(0, 2), 2, 3
NO_KEY = -1  # in rows without a key
_STEPS_AT_ONCE = 1 << 12


def declare(tensors, length):
    """Sets the length of vectors in a whole epoch; see the module."""
    for tensor in tf.nest.flatten(tensors):
        tensor.set_shape([length, *tensor.shape[1:]])
    return tensors


def undeclared(tensor):
    """A tensor whose length may be another than it is declared."""
    return tf.raw_ops.PlaceholderWithDefault(
        input=tensor, shape=[None, *tensor.shape[1:]]
    )


def whole(keys, *raw):
    """A batch without the rows that have no key.

    `keys` has the shape `(batch, KEY_SIZE)`, and `raw` that first dimension.
    """
    count = tf.math.count_nonzero(keys[:, RECORD] >= 0, dtype=tf.int32)
    return keras.tree.map_structure(
        lambda tensor: undeclared(tensor)[:count], (keys, *raw)
    )


def keys_of(seed_and_epoch, records, positions):
    """Keys of shape `(len(records), KEY_SIZE)` for records at positions.

    All are int64 vectors, the first of two numbers.
    """
    epoch = tf.broadcast_to(seed_and_epoch, [tf.size(records), 2])
    return tf.concat([epoch, tf.stack([records, positions], axis=1)], axis=1)


def of_worker(plan, positions, where):
    """Whether positions of an epoch are of this worker; bools.

    `where` is an `EpochStart`.
    """
    step = (positions - where.first) // plan.global_batch
    first, length = plan.slice_of(step, where.first, tf.minimum)
    found = (positions >= first) & (positions < first + length)
    return found & (step < where.steps)


def shuffled(positions, size, key):
    """The records at `positions` of an epoch of `size` records, int64 vectors.

    Example:

    >>> order = shuffled(tf.range(5, dtype=tf.int64), 5, [0, 3])
    >>> sorted(order.numpy().tolist())
    [0, 1, 2, 3, 4]
    """
    # One more, because the kernel refuses an empty vector (2.21), which a
    # worker has whose window holds no record of its own.
    return tf.random.experimental.index_shuffle(
        tf.pad(positions, [[0, 1]]), key, size - 1
    )[:-1]


def indexed_keys(recipe, begin):
    """A dataset of keys, `(plan.slice_size, KEY_SIZE)` for each step.

    `begin` is a method of a `Position`, which each iterator calls once.
    """
    plan = recipe.plan

    def chunks_of_epoch(_):
        where = begin(recipe.plan)
        first = tf.range(0, where.steps, _STEPS_AT_ONCE)
        start = tf.broadcast_to(tf.stack(where), [tf.size(first), len(where)])
        return declare((start, first), plan.num_steps)

    def steps_of_chunk(start, first):
        where = EpochStart(*tf.unstack(start))
        # Of many steps at once: in each, it would be many operations.
        step = tf.range(first, tf.minimum(first + _STEPS_AT_ONCE, where.steps))
        first, size = plan.slice_of(step, where.first, tf.minimum)
        key = tf.stack([where.seed, where.epoch])
        keys = tf.broadcast_to(key, [tf.size(step), 2])
        # Of as many chunks as there are steps: see the module.
        return declare((keys, first, first + size), 1)

    def keys_of_step(key, first, end):
        positions = records = tf.range(first, end)
        if plan.remainder == "pad":
            records = positions % plan.num_records
        if recipe.source.order is not None:
            records = recipe.source.order(
                records, *tf.unstack(key), recipe.shuffle
            )
        elif recipe.shuffle:
            records = shuffled(records, plan.num_records, key)
        return declare(keys_of(key, records, positions), plan.slice_size)

    chunks = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), chunks_of_epoch, name="position"
    )
    heads = single_device.map_on_host(
        chunks.unbatch(), steps_of_chunk, name="steps"
    )
    return single_device.map_on_host(
        heads.unbatch(), keys_of_step, name="order"
    )
