"""A `train_step` that calls its model on other inputs than x, as diffusion."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

X = np.random.RandomState(0).normal(size=(16, 6)).astype("float32")


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(6)]
        self.net = keras.Sequential([keras.Input((7,)), *layers])

    def call(self, noisy, time):
        return self.net(tf.concat([noisy, time], -1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            y, y_pred = self.denoised(data)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(None, y, y_pred)

    def denoised(self, x):
        return [x, x], [self(0.5 * x, tf.ones_like(x[:, :1]))] * 2


def fit(strategy=None, callbacks=()):
    """Weights and logs."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Diffusion()
        model.compile(
            "sgd",
            ["mse", "mae"],
            metrics=["mae", "mae"],
            run_eagerly=not strategy,
        )
    history = model.fit(
        X, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return [*model.get_weights(), *history.history.values()]


class OtherInputsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        dict(data=2, microbatches=2),
        dict(),
        dict(data=2),
        dict(microbatches=4),
    )
    @pytest.mark.crossing(every=4)
    def test_train_as_on_one_device(self, microbatches=None, **axes):
        expected, callbacks, strategy = fit(), [], None
        if microbatches:
            callback = tfscale.callbacks.GradientAccumulation(microbatches)
            callbacks = [callback]
        if axes or not microbatches:
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(**axes))
        found = fit(strategy, callbacks)
        for value, each in zip(expected, found, strict=True):
            np.testing.assert_allclose(each, value, rtol=1e-5, atol=1e-6)

    def test_a_plain_step_says_what_the_data_should_be(self):
        with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
            layers = [keras.Input((7,)), keras.layers.Dense(6)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(ValueError, "(?s)shape=.*6"):
            model.fit(X, X, verbose=0)


if __name__ == "__main__":
    tf.test.main()
