"""From a source and a plan to a stream of keyed records, in order.

A key has six int64 numbers, which follow a record to the end of the chain:

    0 seed    1 epoch    2 record    3 real?    4 from    5 to

Record is its number in the source; a record that only pads the last batch is
not real. The batch moves the position from one index to the other: `from` is -1
if the batch moves nothing, `to` is 0 if it ends the epoch.

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

KEY_SIZE = 6
SEED, EPOCH, RECORD, REAL, FROM, TO = range(KEY_SIZE)
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
        int64 scalars `(seed, epoch, start, steps, moving, final)`: steps are
        those left in the epoch, moving is the first of them that moves the
        position, final is this worker's last position in the epoch.
    """
    seed, epoch, index, moving = tf.unstack(position.begin())
    epoch, start = normal(epoch, index, plan)
    steps = plan.steps_in(plan.limit - start)
    # The last step always moves the position, unless none may.
    moving = tf.where(moving < 0, steps, tf.minimum(moving, steps - 1))
    if plan.batches_per_step > 1:
        moving = tf.maximum(moving, steps - 1)
    first, size = plan.slice_of(steps - 1, start, tf.minimum)
    return seed, epoch, start, steps, moving, first + (size - 1)


def normal(epoch, index, plan):
    """Epoch and position in its line, with an epoch's end as the next's begin.

    `index` counts the records over all lines.
    """
    start = index // plan.lines if plan.lines > 1 else index
    over = tf.cast(start > plan.last_start, tf.int64)
    return epoch + over, start * (1 - over)


def moves_of(where, step, plan):
    """From where to where each step moves the position, as a key has it.

    `where` is a result of `epoch_start`, `step` an int64 vector.
    """
    _, _, start, steps, moving, _ = where
    here = start + step * plan.global_batch
    # The first step that moves it also counts the steps before.
    begin = tf.where(step > moving, here, start)
    begin = tf.where(step >= moving, begin, NO_KEY)
    is_last = tf.equal(step, steps - 1)
    end = tf.where(is_last, tf.zeros_like(here), here + plan.global_batch)
    return begin, end


def keys_of(where, records, positions, plan, moves=None):
    """Keys of shape `(len(records), KEY_SIZE)` for records at positions.

    `where` is a result of `epoch_start`; records and positions are int64
    vectors. If all are of one step, `moves` is what `moves_of` says of it.
    """
    seed, epoch, start, _, _, final = where
    shape = tf.shape(records)
    if moves is None:
        step = (positions - start) // plan.global_batch
        begin, end = moves_of(where, step, plan)
    else:
        begin, end = (tf.fill(shape, each) for each in moves)
    if plan.batches_per_step > 1:  # the last batch moves the position
        begin = tf.where(tf.equal(positions, final), begin, NO_KEY)
    return tf.stack(
        [
            tf.fill(shape, seed),
            tf.fill(shape, epoch),
            records,
            tf.cast(positions < plan.num_records, tf.int64),
            begin,
            end,
        ],
        axis=1,
    )


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
    _, epoch, _, _, begin, end = tf.unstack(keys[0])
    if plan.batches_per_step > 1:  # which its last record says
        begin = tf.reduce_max(keys[:, FROM])
    _, at_epoch, at_index = tf.unstack(position.state())
    found_epoch, found = normal(at_epoch, at_index, plan)
    moves = tf.equal(found_epoch, epoch) & tf.equal(found, begin)
    epoch += tf.cast(tf.equal(end, 0), tf.int64)
    index = end * plan.lines if plan.lines > 1 else end
    change = tf.stack(
        [tf.zeros((), tf.int64), epoch - at_epoch, index - at_index]
    )
    # A sum starts faster than a condition; see the module.
    position.add(change * tf.cast(moves, tf.int64))


def repeated(where, number):
    """A result of `epoch_start`, repeated in `number` rows."""
    return tf.broadcast_to(tf.stack(where), [number, len(where)])


def indexed_keys(recipe, position):
    """A dataset of keys, `(plan.slice_size, KEY_SIZE)` for each step."""
    plan = recipe.plan

    def steps_of_epoch(_):
        where = epoch_start(position, plan)
        step = tf.range(recipe.lane, where[3], recipe.num_lanes)
        length = plan.num_steps
        # Of all steps at once: in each, it would be many operations.
        moves = tf.stack(moves_of(where, step, plan), axis=1)
        head = tf.concat([repeated(where, tf.size(step)), moves], 1)
        return declare(head, length), declare(step, length)

    def keys_of_step(head, step):
        *where, begin, end = tf.unstack(head)
        seed, epoch, start, *_ = where
        first, size = plan.slice_of(step, start, tf.minimum)
        positions = records = tf.range(first, first + size)
        if plan.remainder == "pad":
            records = positions % plan.num_records
        if recipe.source.order is not None:
            records = recipe.source.order(records, seed, epoch, recipe.shuffle)
        elif recipe.shuffle:
            records = order.shuffled(records, plan.num_records, seed, epoch)
        keys = keys_of(where, records, positions, plan, (begin, end))
        return declare(keys, plan.slice_size)

    heads = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), steps_of_epoch, name="position"
    )
    return single_device.map_on_host(
        heads.unbatch(), keys_of_step, name="order"
    )
