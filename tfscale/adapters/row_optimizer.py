"""Sums the gradients of embedding rows that occur more than once in a batch.

Keras' optimizers on TensorFlow square each occurrence instead of the sum. The
gradient stays a list of rows, so servers receive the rows of the batch and not
the table. Values that all updates of a step share, the learning rate and
`iterations`, are sent once.
"""

import keras
import tensorflow as tf

from tfscale._internals import in_place
from tfscale.graphs.noting_scope import WrittenAtOnce


class SummedRows(in_place.Mixin):
    """An optimizer that receives each row once."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`."""
        return super().apply([_summed(g) for g in grads], trainable_variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # Tensors are sent to each server once, variables once per update.
        once = [tf.convert_to_tensor(learning_rate)]
        once.append(tf.convert_to_tensor(self.iterations))
        super()._backend_update_step(grads, trainable_variables, once)

    def update_step(self, gradient, variable, learning_rate):
        """See `keras.optimizers.Optimizer`; outside of the step's scope."""
        rate, iterations = learning_rate
        with WrittenAtOnce([(self.iterations, iterations)]):
            super().update_step(gradient, variable, rate)


def adapt_row_optimizer(optimizer: keras.Optimizer) -> None:
    """Has an optimizer of parameter servers receive each row once."""
    in_place.put(optimizer, SummedRows)


def _summed(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, indices = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, indices, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
