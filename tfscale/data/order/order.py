"""The order of an epoch as a function from position to record.

`tf.random.experimental.index_shuffle` is a keyed permutation of 0 to n - 1,
evaluated at one position at a time. So the order needs no buffer, is the same
on every worker, and can be entered anywhere.
"""

import tensorflow as tf


def shuffled(positions, size, seed, epoch):
    """The records at `positions` of an epoch of `size` records, int64 vectors.

    Example:

    >>> order = shuffled(tf.range(5, dtype=tf.int64), 5, 0, 3)
    >>> sorted(order.numpy().tolist())
    [0, 1, 2, 3, 4]
    """
    key = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    # One more, because the kernel refuses an empty vector (2.21), which a
    # worker has whose window holds no record of its own.
    shuffled_ = tf.random.experimental.index_shuffle(
        tf.pad(positions, [[0, 1]]), key, tf.cast(size, tf.int64) - 1
    )
    return shuffled_[:-1]


def augmentation_seed(seed, epoch, record):
    """The seed of a record in an epoch, of shape `(2,)`, for `tf.random`."""
    key = tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.experimental.stateless_fold_in(key, record)
