"""Records that Python makes are copied, before replicas get their parts.

A tensor that a function of Python returns to tf.data may lie in the memory of
the user's array, and TensorFlow computes in the memory of a part of a batch
that nobody else has: his targets were then differences of targets and
predictions.
"""

import tensorflow as tf

from tfscale import _internals

_NUMBERS = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8),
    *(tf.complex64, tf.complex128),
)


def in_memory_of_tensorflow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose records, if Python makes them, are copies."""
    if not _internals.calls_python(dataset):
        return dataset

    def copy(*records):
        tensors = tf.nest.flatten(records, expand_composites=True)
        return tf.nest.pack_sequence_as(
            dataset.element_spec,
            [
                tf.raw_ops.DeepCopy(x=x) if x.dtype in _NUMBERS else x
                for x in tensors
            ],
            expand_composites=True,
        )

    return dataset.map(copy)
