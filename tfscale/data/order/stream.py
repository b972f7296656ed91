"""From a source and a plan to a stream of keyed records, in order.

A key has eight int64 numbers, which follow a record to the end of the chain:

    0 seed    1 epoch        of the record
    2 epoch   3 index        from which the batch moves the position,
    4 epochs  5 records      and by how much
    6 record  7 position     its number in the source, and in the epoch

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

KEY_SIZE = 8
SEED_AND_EPOCH, _FROM, _CHANGE = slice(0, 2), slice(2, 4), slice(4, 6)
_INDEX, RECORD, POSITION = 3, 6, 7
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


def epoch_start(recipe, position):
    """The `EpochStart` of an iterator, which reads the position once.

    `position` is a `Position`, or an `EpochStart` that was read before.
    """
    if isinstance(position, EpochStart):
        return position
    start = position.begin(recipe.plan, recipe.is_read_ahead)
    return EpochStart(*tf.unstack(start))


def heads_of(where, step, plan):
    """The first six numbers of the keys of each step.

    `where` is an `EpochStart`, `step` an int64 vector.
    """
    # The position before each step and after it, of shape (steps, 2, 2).
    ends = tf.stack([step, step + 1], axis=1)
    over = tf.cast(tf.equal(ends, where.steps), tf.int64)
    index = (ends * plan.global_batch + where.first) * plan.lines * (1 - over)
    # The first step that moves it also counts the steps before.
    path = tf.where(
        tf.expand_dims(ends > where.moving, 2),
        tf.stack([where.epoch + over, index], axis=2),
        tf.stack([where.at_epoch, where.at_index]),
    )
    origin, target = tf.unstack(path, axis=1)
    record = tf.broadcast_to(
        tf.stack([where.seed, where.epoch]), tf.shape(origin)
    )
    return tf.concat([record, origin, target - origin], axis=1)


def keys_of(heads, records, positions, final, plan):
    """Keys of shape `(len(records), KEY_SIZE)` for records at positions.

    `heads` is a result of `heads_of`, for each record; `final` is the last
    position of their step, or of the epoch; records and positions are int64
    vectors.
    """
    if plan.batches_per_step > 1:  # the last batch moves the position
        lacks = tf.not_equal(positions, final)[:, tf.newaxis] & tf.constant(
            [column == _INDEX for column in range(RECORD)]
        )
        heads = tf.where(lacks, tf.constant(NO_KEY, tf.int64), heads)
    return tf.concat([heads, tf.stack([records, positions], axis=1)], 1)


def of_worker(plan, positions, where):
    """Whether positions of an epoch are of this worker; bools.

    `where` is an `EpochStart`.
    """
    step = (positions - where.first) // plan.global_batch
    first, length = plan.slice_of(step, where.first, tf.minimum)
    found = (positions >= first) & (positions < first + length)
    return found & (step < where.steps)


def move(position, plan, keys):
    """Moves the position by a batch with these `keys`, which is consumed.

    A position that was set since the batch before stays.
    """
    # One of its records may say it.
    row = tf.argmax(keys[:, _INDEX]) if plan.batches_per_step > 1 else 0
    moves = tf.reduce_all(position.here() == keys[row, _FROM])
    # A sum starts faster than a condition; see the module.
    position.add(keys[row, _CHANGE] * tf.cast(moves, tf.int64))


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


def indexed_keys(recipe, position):
    """A dataset of keys, `(plan.slice_size, KEY_SIZE)` for each step."""
    plan = recipe.plan

    def chunks_of_epoch(_):
        where = epoch_start(recipe, position)
        first = tf.range(0, where.steps, _STEPS_AT_ONCE)
        start = tf.broadcast_to(tf.stack(where), [tf.size(first), len(where)])
        return declare((start, first), plan.num_steps)

    def steps_of_chunk(start, first):
        where = EpochStart(*tf.unstack(start))
        # Of many steps at once: in each, it would be many operations.
        step = tf.range(first, tf.minimum(first + _STEPS_AT_ONCE, where.steps))
        first, size = plan.slice_of(step, where.first, tf.minimum)
        # Of as many chunks as there are steps: see the module.
        return declare((heads_of(where, step, plan), first, first + size), 1)

    def keys_of_step(head, first, end):
        key = head[SEED_AND_EPOCH]
        positions = records = tf.range(first, end)
        if plan.remainder == "pad":
            records = positions % plan.num_records
        if recipe.source.order is not None:
            records = recipe.source.order(
                records, *tf.unstack(key), recipe.shuffle
            )
        elif recipe.shuffle:
            records = shuffled(records, plan.num_records, key)
        heads = tf.broadcast_to(head, [tf.size(records), RECORD])
        keys = keys_of(heads, records, positions, end - 1, plan)
        return declare(keys, plan.slice_size)

    chunks = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), chunks_of_epoch, name="position"
    )
    heads = single_device.map_on_host(
        chunks.unbatch(), steps_of_chunk, name="steps"
    )
    return single_device.map_on_host(
        heads.unbatch(), keys_of_step, name="order"
    )
