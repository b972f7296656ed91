"""An update is traced by one replica, and made by all."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale

X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")


class Counting(keras.optimizers.SGD):
    """Counts the updates of variables that are traced."""

    count = 0

    def update_step(self, gradient, variable, learning_rate):
        Counting.count += 1
        super().update_step(gradient, variable, learning_rate)


class OfTheBatch(keras.optimizers.SGD):
    """Uses a tensor of the step that no argument has."""

    scale = 1.0

    def apply(self, grads, trainable_variables=None):
        self.scale = 1.0 + tf.reduce_max(tf.abs(grads[0]))
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / self.scale, variable, learning_rate)


class Branching(keras.optimizers.SGD):
    """Has functions of TensorFlow, which live as long as the graph of it."""

    def update_step(self, gradient, variable, learning_rate):
        norm = tf.norm(gradient)
        update = super().update_step
        tf.cond(
            norm > 0.1,
            lambda: update(gradient / norm, variable, learning_rate),
            lambda: update(gradient, variable, learning_rate),
        )


class Calling(keras.optimizers.SGD):
    """Calls a Python function."""

    def update_step(self, gradient, variable, learning_rate):
        halved = tf.numpy_function(lambda x: x / 2, [gradient], gradient.dtype)
        halved.set_shape(gradient.shape)
        super().update_step(halved, variable, learning_rate)


def build():
    return keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(2),
            keras.layers.Dense(1),
        ]
    )


def trained(optimizer, scope, **options):
    keras.utils.set_random_seed(0)
    with scope:
        model = build()
        model.compile(optimizer(), "mse", **options)
    # The last batch has a shape of its own, and a replica without a row.
    model.fit(X, X[:, :1], batch_size=5, epochs=2, verbose=0, shuffle=False)
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable) for variable in variables]


def mesh(**axes):
    devices, layouts = tfscale.device_mesh(**axes), None
    if "model" in axes:
        layouts = tfscale.auto_layout_map(build, devices)
    return tfscale.MeshStrategy(devices, layouts).scope()


class SharedUpdatesTest(parameterized.TestCase):
    @parameterized.parameters({}, {"model": 2})
    @pytest.mark.crossing(every=2)
    def test_all_have_one_trace(self, **ranks):
        counts = []
        for replicas in (1, 2):
            Counting.count = 0
            trained(Counting, mesh(data=replicas, **ranks))
            counts.append(Counting.count)
        self.assertGreater(counts[0], 0)
        self.assertEqual(counts[0], counts[1])

    @pytest.mark.crossing
    def test_xla_compiles_what_each_traces(self):
        # One cluster would have operations of both replicas.
        counts = []
        for jit_compile in (False, True):
            Counting.count = 0
            trained(Counting, mesh(data=2), jit_compile=jit_compile)
            counts.append(Counting.count)
        self.assertGreater(counts[1], counts[0])

    @parameterized.parameters(dict(data=2), dict(model=2))
    @pytest.mark.crossing(every=2)
    def test_an_update_waits_for_what_a_step_says(self, **axes):
        with mesh(**axes):
            model, optimizer = build(), keras.optimizers.Adam()
            optimizer.build(model.trainable_variables)
        variables = [*model.weights, *optimizer.variables]
        before = [np.asarray(variable) for variable in variables]

        def fail():
            time.sleep(0.5)
            raise ValueError("a check has failed")

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X[:4]))
            gradients = tape.gradient(loss, model.trainable_variables)
            with tf.control_dependencies([tf.py_function(fail, [], [])]):
                optimizer.apply(gradients, model.trainable_variables)

        strategy = model.weights[0].value.distribute_strategy
        with self.assertRaisesRegex(Exception, "a check has failed"):
            tf.function(strategy.run)(step)
        for variable, value in zip(variables, before, strict=True):
            np.testing.assert_array_equal(variable, value)

    @parameterized.parameters(
        Branching,
        Calling,
        Counting,
        OfTheBatch,
        # It assigns to what has no gradient.
        keras.optimizers.Nadam,
        lambda: keras.optimizers.Adam(clipnorm=0.1, weight_decay=0.1),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Muon()),
    )
    @pytest.mark.crossing(every=8)
    def test_numbers_are_those_of_one_device(self, optimizer):
        expected = trained(optimizer, contextlib.nullcontext())
        found = trained(optimizer, mesh(data=3))
        for of_one, of_replicas in zip(expected, found, strict=True):
            np.testing.assert_allclose(of_replicas, of_one, 2e-5, 1e-6)

    @pytest.mark.crossing
    def test_ranks_update_their_shards(self):
        expected = trained(keras.optimizers.Adam, contextlib.nullcontext())
        found = trained(keras.optimizers.Adam, mesh(data=2, model=2))
        for of_one, of_ranks in zip(expected, found, strict=True):
            np.testing.assert_allclose(of_ranks, of_one, 2e-5, 1e-6)


if __name__ == "__main__":
    absltest.main()
