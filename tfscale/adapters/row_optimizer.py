"""Sums the gradients of embedding rows that occur more than once in a batch.

Keras' optimizers on TensorFlow square each occurrence instead of the sum. The
gradient stays a list of rows, so servers receive the rows of the batch and not
the table. Values that all updates of a step share, the learning rate and
`iterations`, are sent once. On one device, where a comparison needs it,
gradients become dense.
"""

from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
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


class DenseGradients(in_place.Mixin):
    """Members that are put before the class of an optimizer.

    Attributes:
        largest: The largest magnitude of a gradient so far, by the id of its
            variable; empty if nobody asks.
    """

    largest: dict[int, tf.Variable]

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`."""
        dense = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        if self.largest:
            self._note_largest(dense, trainable_variables)
        return super().apply(dense, trainable_variables)

    def _note_largest(self, gradients, variables):
        if variables is None:
            variables = attributes.optimized_variables(self)
        for gradient, variable in zip(gradients, variables):
            seen = self.largest.get(id(variable))
            if seen is not None and gradient is not None:
                now = tf.reduce_max(tf.abs(tf.cast(gradient, seen.dtype)))
                seen.assign(tf.maximum(seen, now))


def adapt_dense_optimizer(
    optimizer: keras.Optimizer, largest: dict[int, Any] | None = None
) -> None:
    """Has an optimizer add up the rows of each lookup first."""
    in_place.put(optimizer, DenseGradients, largest=largest or {})


def _summed(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, indices = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, indices, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
