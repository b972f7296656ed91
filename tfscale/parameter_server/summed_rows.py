"""Rows of embeddings that occur more than once in a batch are added up first.

Keras' optimizers on TensorFlow square each occurrence by itself, where the
square of the sum is due. The gradient stays a list of rows: what is sent to a
server is the rows of the batch, and not the table.
"""

import tensorflow as tf

from tfscale import in_place


class SummedRows(in_place.Mixin):
    """An optimizer whose gradients have each row once."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`."""
        return super().apply([_summed(g) for g in grads], trainable_variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # Read once, it goes to each server once; as a variable it would go
        # there for each variable. `iterations` does: Keras reads it in each
        # update, which is made outside of the scope of the step.
        super()._backend_update_step(
            grads, trainable_variables, tf.convert_to_tensor(learning_rate)
        )


def _summed(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, places, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
