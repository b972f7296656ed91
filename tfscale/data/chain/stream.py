"""From a source and a plan to a stream of keyed records, in order.

A key is five int64 numbers that a record carries to the end of the chain:

    0 seed    1 epoch    2 record    3 real?    4 last of the epoch?

Record is its number in the source; a record that only pads the last batch is
not real; the last one tells the end of the chain that the epoch is over.

**Cardinality.** How many elements there are is decided anew by each iterator,
from the position. tf.data must know a number when the dataset is made, and it
has one for `unbatch`: elements times their static first dimension. `declare`
gives a vector the length that it has in a whole epoch, so that the chain knows
what an epoch holds. Nothing checks a static shape against a tensor's own at
run time, and a resumed epoch is simply shorter.

**Few operations.** Each iterator readies every function of the chain anew. Ours
are marked for one device (see `single_device`), which leaves them as they are
written: short.
"""

import keras
import tensorflow as tf

from tfscale.data import single_device
from tfscale.data.chain import order

KEY_SIZE = 5
SEED, EPOCH, RECORD, REAL, LAST = range(KEY_SIZE)
NO_KEY = -1  # in each place of what is no key


def declare(tensor, length):
    """Sets the length that a vector has in a whole epoch; see the module."""
    tensor.set_shape([length, *tensor.shape[1:]])
    return tensor


def whole(keys, *raw):
    """A batch without what has no key, so that it may be shorter than declared.

    Args:
        keys: int64 tensor of shape `(batch, KEY_SIZE)`.
        *raw: Structures of tensors with the same first dimension.

    Returns:
        A tuple of all of them.
    """
    count = tf.math.count_nonzero(keys[:, RECORD] >= 0, dtype=tf.int32)

    def cut(t):
        rows = tf.raw_ops.PlaceholderWithDefault(
            input=t, shape=[None, *t.shape[1:]]
        )
        return rows[:count]

    return keras.tree.map_structure(cut, (keys, *raw))


def place(position, plan):
    """Reads the position once, when an iterator begins.

    Returns:
        int64 scalars `(seed, epoch, start, steps, moves, final)`: steps are
        those left in the epoch, final is this worker's last position in it, and
        moves is 1 if that ends the epoch, or 0. The end of an epoch is the
        beginning of the next one.
    """
    seed, epoch, start, moves = tf.unstack(position.begin())
    if plan.lines > 1:
        start = start // plan.lines
    steps = plan.steps_in(plan.limit - start)
    over = steps < 1
    epoch = epoch + tf.cast(over, tf.int64)
    start = tf.where(over, tf.constant(0, tf.int64), start)
    steps = tf.where(over, tf.constant(plan.num_steps, tf.int64), steps)
    first, size = plan.slice_of(steps - 1, start, tf.minimum)
    return seed, epoch, start, steps, moves, first + (size - 1)


def keys_of(where, records, positions, plan):
    """Keys for records at positions.

    Args:
        where: What `place` returned.
        records: int64 vector.
        positions: int64 vector of the same length.
        plan: `EpochPlan`.

    Returns:
        int64 tensor of shape `(len(records), KEY_SIZE)`.
    """
    seed, epoch, *_, moves, final = where
    shape = tf.shape(records)
    return tf.stack(
        [
            tf.fill(shape, seed),
            tf.fill(shape, epoch),
            records,
            tf.cast(positions < plan.num_records, tf.int64),
            tf.cast(tf.equal(positions, final), tf.int64) * moves,
        ],
        axis=1,
    )


def repeated(where, number):
    """What `place` returned as one row, `number` times below each other."""
    return tf.broadcast_to(tf.stack(where), [number, len(where)])


def indexed_keys(recipe, position):
    """A dataset of the keys of each step, for records read one by one.

    Args:
        recipe: `Recipe`.
        position: `Position`.

    Returns:
        Dataset of int64 tensors of shape `(plan.slice_size, KEY_SIZE)`.
    """
    plan = recipe.plan

    def steps_of_epoch(_):
        where = place(position, plan)
        step = tf.range(recipe.lane, where[3], recipe.num_lanes)
        length = plan.num_steps
        head = repeated(where, tf.size(step))
        return declare(head, length), declare(step, length)

    def keys_of_step(head, step):
        where = tf.unstack(head)
        seed, epoch, start, *_ = where
        first, size = plan.slice_of(step, start, tf.minimum)
        positions = records = tf.range(first, first + size)
        if plan.remainder == "pad":
            records = positions % plan.num_records
        if recipe.source.order is not None:
            records = recipe.source.order(records, seed, epoch, recipe.shuffle)
        elif recipe.shuffle:
            records = order.shuffled(records, plan.num_records, seed, epoch)
        keys = keys_of(where, records, positions, plan)
        return declare(keys, plan.slice_size)

    heads = single_device.map_on_host(
        tf.data.Dataset.from_tensors(0), steps_of_epoch, name="position"
    )
    return single_device.map_on_host(
        heads.unbatch(), keys_of_step, name="order"
    )
