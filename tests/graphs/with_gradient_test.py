"""Gradients of one's own, and what they leave in memory.

`tf.custom_gradient` keeps the graph of its call as long as the process lives:
of each model that had trained on replicas, all weights and slots stayed.
"""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale.graphs.with_gradient import with_gradient

X = np.ones((8, 64), "float32")


def tripled(gradients, inputs):
    (dy, _), (x, _) = gradients, inputs
    return [3.0 * dy * x, None]


def num_graphs():
    keras.utils.clear_session()
    gc.collect()
    return sum(type(x).__name__ == "FuncGraph" for x in gc.get_objects())


def train(axes, zero_stage):
    layouts = {".*up/kernel": (None, "model")} if "model" in axes else None
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(**axes), layouts, zero_stage=zero_stage
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,))])
        model.add(keras.layers.Dense(64, name="up"))
        # On ranks Keras' own `all_reduce` outside of replicas keeps a graph.
        synchronized = "model" not in axes
        model.add(keras.layers.BatchNormalization(synchronized=synchronized))
        model.compile("adam", "mse")
    model.fit(X, X, verbose=0)
    model.predict(X, verbose=0)


class WithGradientTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_is_the_one_that_is_given(self, is_function):
        def compute(x, y):
            return with_gradient(tripled, [2.0 * x, y], [x, y])

        if is_function:
            compute = tf.function(compute)
        x, y = tf.constant(5.0), tf.constant(7.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            results = compute(x, y)
            loss = 10.0 * results[0] + results[1]
        self.assertAllEqual(results, [10.0, 7.0])
        self.assertEqual(float(tape.gradient(loss, x)), 150.0)
        self.assertIsNone(tape.gradient(loss, y))

    @parameterized.parameters(
        ({"data": 2}, 0),
        ({"data": 2}, 1),
        ({"data": 2}, 3),
        ({"model": 2}, 0),
        ({"data": 2, "model": 2}, 3),
    )
    @pytest.mark.crossing(every=5)
    def test_a_model_that_was_trained_is_freed(self, axes, zero_stage):
        before = num_graphs()
        train(axes, zero_stage)
        self.assertEqual(num_graphs(), before)


if __name__ == "__main__":
    tf.test.main()
