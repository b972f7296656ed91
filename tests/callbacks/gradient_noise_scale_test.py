"""The noise scale that is measured is the one there is."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale import data
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import GradientNoiseScale

DIM = 64


class Quadratic(keras.layers.Layer):
    """Half the square of `w - x`: the gradient of a row is `w - x`."""

    def build(self, input_shape):
        self.w = self.add_weight(shape=[DIM], initializer="ones")

    def call(self, x):
        return self.w - x


def half_square(y, difference):
    return 0.5 * tf.reduce_sum(tf.square(difference), axis=-1)


def quadratic(rate=0.0):
    model = keras.Sequential([keras.Input((DIM,)), Quadratic()])
    model.compile(keras.optimizers.SGD(rate), half_square)
    return model


def on_mesh(layout=None, *, zero_stage=0, **axes):
    layouts = None
    if layout:
        layouts = {
            ".*first/kernel": (None, "model"),
            ".*second/kernel": ("model", None),
        }
    mesh = tfscale.device_mesh(**axes)
    return tfscale.MeshStrategy(mesh, layouts, zero_stage=zero_stage)


class NoiseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (dict(data=2), 1, 32), (dict(data=4), 1, 32), (None, 4, 64)
    )
    @pytest.mark.crossing(every=3)
    def test_of_a_quadratic_with_known_noise(self, axes, num_microbatches, s):
        """|G|^2 is 64 and S is `s` times that, after 200 steps of 32 rows."""
        draw = np.random.RandomState(0).randn(200 * 32, DIM) * math.sqrt(s)
        strategy = on_mesh(**axes) if axes else tf.distribute.get_strategy()
        with strategy.scope():
            model = quadratic()
        noise = GradientNoiseScale()
        history = model.fit(
            draw.astype("float32"),
            np.zeros(len(draw)),
            batch_size=32,
            shuffle=False,
            verbose=0,
            callbacks=[noise, GradientAccumulation(num_microbatches)],
        )
        self.assertNear(noise.noise_scale, s, 0.15 * s)
        self.assertEqual(
            history.history["gradient_noise_scale"], [noise.noise_scale]
        )

    @pytest.mark.crossing
    def test_all_that_divides_a_batch_or_a_model_measures_the_same(self):
        """On two replicas as in two microbatches, however these are divided."""
        draw = np.random.RandomState(1)
        x, y = draw.randn(36, 4), draw.randn(36, 2)

        def measured(strategy, num_microbatches=1, pipeline=False):
            keras.utils.set_random_seed(2)
            with strategy.scope():
                model = keras.Sequential(
                    [
                        keras.Input((4,)),
                        keras.layers.Dense(4, "tanh", name="first"),
                        keras.layers.Dense(2, name="second"),
                    ]
                )
                if pipeline:
                    model = tfscale.PipelineModel(
                        model, num_microbatches=2, balance="params"
                    )
                model.compile(keras.optimizers.Adam(0.01), "mse")
            noise = GradientNoiseScale(smoothing=0.5)
            model.fit(
                x,
                y,
                batch_size=16,
                shuffle=False,
                verbose=0,
                callbacks=[noise, GradientAccumulation(num_microbatches)]
                if num_microbatches > 1
                else [noise],
            )
            return noise.get_state()["means"]

        expected = measured(tf.distribute.get_strategy(), 2)
        self.assertNear(expected[2], 1 - 0.5**3, 1e-6)
        for name, strategy, arguments in (
            ("ZeRO", on_mesh(data=2, zero_stage=1), {}),
            ("model ranks", on_mesh("split", data=2, model=2), {}),
            (
                "one replica",
                on_mesh("split", model=2),
                dict(num_microbatches=2),
            ),
            ("pipeline", on_mesh(data=2, pipeline=2), dict(pipeline=True)),
        ):
            with self.subTest(name):
                np.testing.assert_allclose(
                    measured(strategy, **arguments), expected, rtol=1e-4
                )

    def test_it_is_gone_when_fit_has_ended(self):
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise KeyboardInterrupt

        strategy = on_mesh(data=2)
        with strategy.scope():
            model = quadratic()
        x, y = np.ones([8, DIM]), np.zeros(8)
        noise = GradientNoiseScale()
        with self.assertRaises(KeyboardInterrupt):
            model.fit(x, y, verbose=0, callbacks=[noise, Stop()])
        before = noise.get_state()["means"]
        model.fit(x, y, verbose=0)
        self.assertAllEqual(noise.get_state()["means"], before)
        model.fit(x, y, verbose=0, callbacks=[noise])
        self.assertNotAllEqual(noise.get_state()["means"], before)
        self.assertIsNone(strategy.extended.gradient_noise)

    @parameterized.parameters(
        (dict(smoothing=1.0), "Received: smoothing=1.0"),
        (dict(batch_sizes=(8, 4)), r"Received: batch_sizes=\(8, 4\)"),
        (
            dict(batch_sizes=(1, 4), learning_rate="linear"),
            "Received: learning_rate='linear'",
        ),
        (dict(learning_rate="sqrt"), "without `batch_sizes`"),
    )
    def test_bad_arguments_are_refused(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            GradientNoiseScale(**arguments)

    @parameterized.parameters(
        ([], {}, "one replica, and no accumulation"),
        ([GradientAccumulation(2)], dict(batch_sizes=(1, 64)), "ndarray|None"),
    )
    def test_what_cannot_be_measured_or_adapted_is_refused(
        self, others, arguments, message
    ):
        model = quadratic()
        with self.assertRaisesRegex(ValueError, message):
            model.fit(
                np.ones([8, DIM]),
                np.zeros(8),
                verbose=0,
                callbacks=[GradientNoiseScale(**arguments), *others],
            )
        model.fit(np.ones([8, DIM]), np.zeros(8), verbose=0)


class Batches(keras.callbacks.Callback):
    """Notes how many batches each epoch has, and what was asked for."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.counts = []
        self.targets = []
        self._stop_after = stop_after

    def on_epoch_begin(self, epoch, logs=None):
        self.counts.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.counts[-1] += 1
        if [len(self.counts), self.counts[-1]] == self._stop_after:
            raise KeyboardInterrupt

    def get_state(self):
        return {"counts": self.counts}

    def set_state(self, state):
        self.counts = state["counts"]


class AdaptingTest(tf.test.TestCase, parameterized.TestCase):
    def fit(self, noise, *others, stop_after=None, epochs=3, model=None):
        """64 rows in batches of 8, with a noise scale of 32."""
        draw = np.random.RandomState(0).randn(64, DIM) * math.sqrt(32)
        keras.utils.set_random_seed(3)
        model = model or quadratic(0.01)
        batches = Batches(stop_after)
        pipeline = data.pipeline(
            data.arrays(draw.astype("float32"), np.zeros(64)),
            batch_size=8,
            seed=1,
        )
        history = model.fit(
            pipeline,
            epochs=epochs,
            verbose=0,
            callbacks=[GradientAccumulation(2), noise, batches, *others],
        )
        return model, batches, history

    @parameterized.parameters(("sqrt", 2.0), ("adascale", None))
    @pytest.mark.crossing(every=2)
    def test_batch_size_and_learning_rate_follow_at_an_epochs_beginning(
        self, rule, factor
    ):
        noise = GradientNoiseScale(batch_sizes=(4, 32), learning_rate=rule)
        model, batches, history = self.fit(noise)
        self.assertEqual(batches.counts, [8, 2, 2])
        self.assertEqual(history.history["batch_size"], [8, 32, 32])
        rate = float(model.optimizer.learning_rate.numpy())
        if factor is None:  # between none and the ratio of the batch sizes
            self.assertBetween(rate, 0.015, 0.039)
        else:
            self.assertNear(rate, 0.01 * factor, 1e-6)

    def test_a_second_fit_has_the_learning_rate_of_its_batch_size(self):
        # It was multiplied once more in each `fit`.
        noise = GradientNoiseScale(batch_sizes=(4, 32), learning_rate="sqrt")
        model, _, _ = self.fit(noise)
        _, _, history = self.fit(noise, model=model)
        self.assertEqual(history.history["batch_size"], [32, 32, 32])
        rate = float(model.optimizer.learning_rate.numpy())
        self.assertNear(rate, 0.01 * 2, 1e-6)
        # A rate set by hand is for the batch size of the pipeline.
        model.optimizer.learning_rate = 0.005
        self.fit(noise, model=model, epochs=1)
        rate = float(model.optimizer.learning_rate.numpy())
        self.assertNear(rate, 0.005 * 2, 1e-6)

    @pytest.mark.crossing
    def test_a_run_that_goes_on_has_the_batch_size_that_it_had(self):
        def callbacks(name):
            return (
                GradientNoiseScale(batch_sizes=(4, 16), learning_rate="sqrt"),
                tfscale.callbacks.BackupAndRestore(
                    f"{folder}/{name}", save_freq=1
                ),
            )

        folder = self.create_tempdir().full_path
        whole, batches, history = self.fit(*callbacks("whole"))
        with self.assertRaises(KeyboardInterrupt):
            self.fit(*callbacks("runs"), stop_after=[2, 3])
        end, found, again = self.fit(*callbacks("runs"))
        self.assertEqual(batches.counts, [8, 4, 4])
        self.assertEqual(found.counts, batches.counts)
        self.assertEqual(again.history, history.history)
        for one, other in zip(end.get_weights(), whole.get_weights()):
            self.assertAllEqual(one, other)


if __name__ == "__main__":
    tf.test.main()
