"""TensorFlow's own strategy over two devices, for what has to run under it."""

import tensorflow as tf


def mirrored() -> tf.distribute.MirroredStrategy:
    """Without collectives, whose keys another strategy in the process has.

    TensorFlow numbers them anew for each, and refuses one of another shape.
    """
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
