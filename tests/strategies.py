"""Strategies over two devices, for what has to run under them."""

import tensorflow as tf

import tfscale


def mirrored() -> tf.distribute.MirroredStrategy:
    """Without collectives, whose keys another strategy in the process has.

    TensorFlow numbers them anew for each, and refuses one of another shape.
    """
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def named(name: str | None) -> tf.distribute.Strategy:
    """That of TensorFlow, of a mesh, or else of one device."""
    if name == "mirrored":
        return mirrored()
    if name == "mesh":
        return tfscale.MeshStrategy(tfscale.device_mesh(data=2))
    return tf.distribute.get_strategy()
