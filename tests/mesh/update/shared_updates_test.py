"""An update is traced by one replica, and made by all."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale

X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")


class Counting(keras.optimizers.SGD):
    """Counts the updates of variables that are traced."""

    count = 0

    def update_step(self, gradient, variable, learning_rate):
        type(self).count += 1
        super().update_step(gradient, variable, learning_rate)


class OfTheBatch(keras.optimizers.SGD):
    """Uses a tensor of the step that no argument has."""

    scale = 1.0

    def apply(self, grads, trainable_variables=None):
        self.scale = 1.0 + tf.reduce_max(tf.abs(grads[0]))
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / self.scale, variable, learning_rate)


def trained(optimizer, scope):
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dense(5, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse")
    # The last batch has a shape of its own, and a replica without a row.
    model.fit(X, X[:, :1], batch_size=5, epochs=2, verbose=0, shuffle=False)
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable) for variable in variables]


def replicas(count):
    return tfscale.MeshStrategy(tfscale.device_mesh(data=count)).scope()


class SharedUpdatesTest(parameterized.TestCase):
    def test_replicas_have_one_trace(self):
        counts = []
        for count in (1, 3):
            Counting.count = 0
            trained(Counting, replicas(count))
            counts.append(Counting.count)
        self.assertEqual(counts[0], counts[1])

    @parameterized.parameters(
        Counting,
        OfTheBatch,
        # It assigns to what has no gradient.
        keras.optimizers.Nadam,
        lambda: keras.optimizers.Adam(clipnorm=0.1, weight_decay=0.1),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Muon()),
    )
    def test_numbers_are_those_of_one_device(self, optimizer):
        expected = trained(optimizer, contextlib.nullcontext())
        found = trained(optimizer, replicas(3))
        for of_one, of_replicas in zip(expected, found, strict=True):
            np.testing.assert_allclose(of_replicas, of_one, 2e-5, 1e-6)


if __name__ == "__main__":
    absltest.main()
