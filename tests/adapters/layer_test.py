"""Layers that a replica without rows gives a row: gradients and operations."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfscale.adapters.layer import adapt_layers
from tfscale.context import step_context

X = np.random.RandomState(0).normal(size=(3, 3, 4, 4, 2)).astype("float32")
MASK = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1]], bool)


def operations(function):
    return len(function.get_concrete_function().graph.get_operations())


class WindowLayerTest(parameterized.TestCase):
    def test_gradients_are_those_of_the_layer(self):
        # Its own gradients, of the first and of the second order.
        films = keras.layers.ConvLSTM2D(2, 2)
        images = keras.layers.Conv2D(2, 2)
        films.build(X.shape)
        images.build(X[:, 0].shape)
        weights = films.trainable_variables + images.trainable_variables

        def gradients(x, mask):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = tf.reduce_sum(tf.tanh(films(x, mask=mask)))
                    y += tf.reduce_sum(tf.tanh(images(x[:, 0])))
                gradient = tape.gradient(y, x)
                square = tf.reduce_sum(gradient**2)
            return [y, gradient, *outer.gradient(square, weights)]

        specs = [
            tf.TensorSpec([None, *X.shape[1:]]),
            tf.TensorSpec([None, 3], tf.bool),
        ]
        expected = tf.function(gradients, input_signature=specs)(X, MASK)
        adapt_layers([films, images])
        with step_context.within(batch_shard=object()):
            of_shard = tf.function(gradients, input_signature=specs)
            found = of_shard(X, MASK)
            of_none = of_shard(X[:0], MASK[:0])
        for one, other in zip(expected, found, strict=True):
            if one is not None:  # The last bias.
                np.testing.assert_array_equal(one, other)
        self.assertEqual(of_none[1].shape, (0, *X.shape[1:]))
        for value in of_none:
            if value is not None:
                np.testing.assert_array_equal(value, np.zeros_like(value))

    def test_adds_few_operations(self):
        # 50 in each layer of each replica, which the first step waited for.
        layer = keras.layers.Conv2D(2, 2)
        layer.build(X[:, 0].shape)

        @tf.function
        def gradient():
            x = tf.compat.v1.placeholder_with_default(X[:, 0], [None, 4, 4, 2])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
            return tape.gradient(y, x)

        plain = operations(gradient)
        adapt_layers([layer])
        with step_context.within(batch_shard=object()):
            of_shard = operations(tf.function(gradient.python_function))
        self.assertLessEqual(of_shard - plain, 24)


if __name__ == "__main__":
    tf.test.main()
