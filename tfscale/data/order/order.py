"""The order of an epoch as a function: position to record, nothing stored.

`tf.random.experimental.index_shuffle` is a keyed permutation of 0 to n - 1
(swap-or-not style rounds, see its docstring) that is evaluated at one position
at a time, so that the order needs no buffer, is the same on every worker, and
can be entered anywhere.
"""

import tensorflow as tf


def shuffled(positions, size, seed, epoch):
    """The records at some `positions` of an epoch, an int64 vector.

    All values are below `size`, the number of records.

    Example:

    >>> order = shuffled(tf.range(5, dtype=tf.int64), 5, 0, 3)
    >>> sorted(order.numpy().tolist())
    [0, 1, 2, 3, 4]
    """
    key = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    # One more, because the kernel refuses a vector of none (2.21): a worker
    # whose window holds nothing of its own failed.
    shuffled_ = tf.random.experimental.index_shuffle(
        tf.pad(positions, [[0, 1]]), key, tf.cast(size, tf.int64) - 1
    )
    return shuffled_[:-1]


def augmentation_seed(seed, epoch, record):
    """A seed of shape `(2,)` for `tf.random.stateless_*`.

    There is one for each record and epoch; all are int64 scalars.
    """
    key = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.experimental.stateless_fold_in(key, record)
