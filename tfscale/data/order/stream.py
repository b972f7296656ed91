"""From a source and a plan to a stream of keyed records, in order.

A key has eight int64 numbers, which follow a record to the end of the chain:

    0 seed    1 epoch        of the record
    2 epoch   3 index        from which the batch moves the position,
    4 epochs  5 records      and by how much
    6 record  7 real?

Record is its number in the source; a record that only pads the last batch is
not real. A batch that moves nothing has the index -1.

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
from tfscale.data.order import order

KEY_SIZE = 8
SEED, EPOCH, _FROM_EPOCH, _FROM, _EPOCHS, _RECORDS, RECORD, REAL = range(8)
NO_KEY = -1  # in rows without a key


def declare(tensor, length):
    """Sets the length of a vector in a whole epoch; see the module."""
    tensor.set_shape([length, *tensor.shape[1:]])
    return tensor


def whole(keys, *raw):
    """A batch without the rows that have no key.

    The batch may be shorter than declared. `keys` has the shape
    `(batch, KEY_SIZE)`, and `raw` that first dimension.
    """
    count = tf.math.count_nonzero(keys[:, RECORD] >= 0, dtype=tf.int32)

    def cut(t):
        rows = tf.raw_ops.PlaceholderWithDefault(
            input=t, shape=[None, *t.shape[1:]]
        )
        return rows[:count]

    return keras.tree.map_structure(cut, (keys, *raw))


def epoch_start(position, plan):
    """Reads the position once, when an iterator begins.

    Returns:
        int64 scalars `(seed, epoch, start, steps, moving, final, at_epoch,
        at_index)`: steps are those left in the epoch, moving is the first of
        them that moves the position, final is this worker's last position in
        the epoch, the last two are the position.
    """
    seed, at_epoch, at_index, moving = tf.unstack(position.begin())
    start = at_index // plan.lines if plan.lines > 1 else at_index
    # The end of an epoch is the beginning of the next.
    over = tf.cast(start > plan.last_start, tf.int64)
    epoch, start = at_epoch + over, start * (1 - over)
    steps = plan.steps_in(plan.limit - start)
    # The last step always moves the position, unless none may.
    moving = tf.where(moving < 0, steps, tf.minimum(moving, steps - 1))
    if plan.batches_per_step > 1:
        moving = tf.maximum(moving, steps - 1)
    first, size = plan.slice_of(steps - 1, start, tf.minimum)
    final = first + (size - 1)
    return seed, epoch, start, steps, moving, final, at_epoch, at_index


def heads_of(where, step, plan):
    """The first six numbers of the keys of each step.

    `where` is a result of `epoch_start`, `step` an int64 vector.
    """
    seed, epoch, start, steps, moving, _, at_epoch, at_index = where
    here = (start + step * plan.global_batch) * plan.lines
    # The first step that moves it also counts the steps before.
    from_epoch = tf.where(step > moving, epoch, at_epoch)
    index = tf.where(step > moving, here, at_index)
    is_last = tf.equal(step, steps - 1)
    after = here + plan.global_batch * plan.lines
    return tf.stack(
        [
            tf.fill(tf.shape(step), seed),
            tf.fill(tf.shape(step), epoch),
            from_epoch,
            tf.where(step < moving, tf.constant(NO_KEY, tf.int64), index),
            epoch + tf.cast(is_last, tf.int64) - from_epoch,
            tf.where(is_last, tf.zeros_like(after), after) - index,
        ],
        axis=1,
    )


def keys_of(heads, records, positions, final, plan):
    """Keys of shape `(len(records), KEY_SIZE)` for records at positions.

    `heads` is a result of `heads_of`, for each record; `final` is one of
    `epoch_start`; records and positions are int64 vectors.
    """
    if plan.batches_per_step > 1:  # the last batch moves the position
        lacks = tf.not_equal(positions, final)[:, tf.newaxis] & tf.constant(
            [column == _FROM for column in range(RECORD)]
        )
        heads = tf.where(lacks, tf.constant(NO_KEY, tf.int64), heads)
    real = tf.cast(positions < plan.num_records, tf.int64)
    return tf.concat([heads, tf.stack([records, real], axis=1)], 1)


def of_worker(recipe, positions, where):
    """Whether positions of an epoch are of this worker and lane; bools.

    `where` is a result of `epoch_start`.
    """
    plan = recipe.plan
    _, _, start, steps, *_ = where
    step = (positions - start) // plan.global_batch
    first, length = plan.slice_of(step, start, tf.minimum)
    found = (positions >= first) & (positions < first + length)
    return found & (step % recipe.num_lanes == recipe.lane) & (step < steps)


def move(position, plan, keys):
    """Moves the position by a batch with these `keys`, which is consumed.

    A position that was set since the batch before stays.
    """
    # One of its records may say it.
    number = tf.argmax(keys[:, _FROM]) if plan.batches_per_step > 1 else 0
    key = keys[number]
    moves = tf.reduce_all(position.state()[1:] == key[_FROM_EPOCH:_EPOCHS])
    # A sum starts faster than a condition; see the module.
    position.add(key[_EPOCHS:RECORD] * tf.cast(moves, tf.int64))


def repeated(where, number):
    """A result of `epoch_start`, repeated in `number` rows."""
    return tf.broadcast_to(tf.stack(where), [number, len(where)])


def indexed_keys(recipe, position):
    """A dataset of keys, `(plan.slice_size, KEY_SIZE)` for each step."""
    plan = recipe.plan

    def steps_of_epoch(_):
        where = epoch_start(position, plan)
        _, _, start, steps, _, final, *_ = where
        # Of all steps at once: in each, it would be many operations.
        step = tf.range(recipe.lane, steps, recipe.num_lanes)
        first, size = plan.slice_of(step, start, tf.minimum)
        heads = heads_of(where, step, plan)
        finals = tf.fill(tf.shape(step), final)
        found = (heads, first, first + size, finals)
        return tuple(declare(t, plan.num_steps) for t in found)

    def keys_of_step(head, first, end, final):
        seed, epoch = head[SEED], head[EPOCH]
        positions = records = tf.range(first, end)
        if plan.remainder == "pad":
            records = positions % plan.num_records
        if recipe.source.order is not None:
            records = recipe.source.order(records, seed, epoch, recipe.shuffle)
        elif recipe.shuffle:
            records = order.shuffled(records, plan.num_records, seed, epoch)
        heads = tf.broadcast_to(head, [tf.size(records), RECORD])
        keys = keys_of(heads, records, positions, final, plan)
        return declare(keys, plan.slice_size)

    heads = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), steps_of_epoch, name="position"
    )
    return single_device.map_on_host(
        heads.unbatch(), keys_of_step, name="order"
    )
