import contextlib
import io
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import strategies
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks.throughput import Throughput
from tfscale.fit.fit import Fit
from tfscale.graphs import flops

LENGTH = 8
ROWS = 4


class Slow(keras.layers.Layer):
    """Takes its time on each replica, and leaves its input as it is."""

    def __init__(self, milliseconds):
        super().__init__()
        self._milliseconds = milliseconds

    def call(self, x):
        def sleep(x):
            time.sleep(self._milliseconds / 1e3)
            return x

        @tf.custom_gradient
        def slow(x):
            y = tf.numpy_function(sleep, [x], x.dtype)
            return tf.ensure_shape(y, x.shape), lambda gradient: gradient

        return slow(x)

    def compute_output_shape(self, shape):
        return shape


class Clock(keras.callbacks.Callback):
    """Seconds of each step of the last epoch, without other callbacks."""

    def on_epoch_begin(self, epoch, logs=None):
        self.times = []
        callbacks = Fit(self.model).callbacks.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter() - self.begin)


def plain_model(milliseconds=0):
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(16, 8),
            Slow(milliseconds),
            keras.layers.Dense(16),
        ]
    )


def compiled(strategy=None, milliseconds=0, wrap=lambda model: model, **kwargs):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = wrap(plain_model(milliseconds))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, **kwargs)
    return model


def tokens(batches, rows=ROWS):
    return np.ones((batches * rows, LENGTH), "int32")


def fit(model, batches=6, epochs=2, callbacks=(), verbose=0, **kwargs):
    """The history of each figure, and what was printed."""
    x = tokens(batches)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = model.fit(
            *(x, x),
            batch_size=ROWS,
            epochs=epochs,
            callbacks=list(callbacks),
            verbose=verbose,
            **kwargs,
        )
    return history.history, printed.getvalue()


def mesh(**axes):
    return tfscale.MeshStrategy(tfscale.device_mesh(**axes))


def piped(model):
    return tfscale.PipelineModel(model, num_microbatches=2)


# name, strategy, model, callbacks, arguments of `compile`, devices
SETTINGS = {
    "one device": (lambda: None, None, (), {}, 1),
    "executions": (lambda: None, None, (), {"steps_per_execution": 2}, 1),
    "accumulation": (
        lambda: mesh(data=2),
        None,
        (lambda: GradientAccumulation(2),),
        {},
        2,
    ),
    "mirrored": (strategies.mirrored, None, (), {}, 2),
    "replicas": (lambda: mesh(data=2), None, (), {}, 2),
    "by speed": (lambda: mesh(data=2, speeds=[1, 2]), None, (), {}, 2),
    "stages": (lambda: mesh(data=2, pipeline=2), piped, (), {}, 4),
    "executions of stages": (
        lambda: mesh(pipeline=2),
        piped,
        (),
        {"steps_per_execution": 2},
        2,
    ),
}


def _dataset(milliseconds):
    def sleep(number):
        time.sleep(milliseconds / 1e3)
        return number

    rows = tf.ones([4, 8])
    return (
        tf.data.Dataset.range(20)
        .map(
            lambda i: (
                rows
                + 0
                * tf.cast(tf.numpy_function(sleep, [i], tf.int64), "float32"),
                rows,
            )
        )
        .map(lambda x, y: (tf.ensure_shape(x, [4, 8]), y))
    )


def _made_on_demand(milliseconds):
    """Batches that are begun when somebody asks, one at a time.

    A map would be made parallel by tf.data, and have its batches ready before
    anybody asks: then any way of counting finds no wait.
    """
    rows = np.ones([4, 8], "float32")

    def batches():
        for _ in range(20):
            time.sleep(milliseconds / 1e3)
            yield rows, rows

    spec = tf.TensorSpec([4, 8], tf.float32)
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=(spec, spec)
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(20))


def _dense(milliseconds=None):
    slow = [] if milliseconds is None else [Slow(milliseconds)]
    model = keras.Sequential([*slow, keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    return model


class ThroughputTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*SETTINGS)
    @pytest.mark.crossing(every=9)
    def test_figures_are_those_of_a_clock_and_of_the_planner(self, name):
        make, wrap, callbacks, arguments, num_devices = SETTINGS[name]
        # Who has to wait for a core between both clocks does so for some
        # milliseconds, which is less than 0.02 of these steps.
        model = compiled(make(), 90, wrap or (lambda model: model), **arguments)
        clock = Clock()
        history, _ = fit(
            model,
            callbacks=[
                clock,
                *(make() for make in callbacks),
                Throughput(peak_tflops=1e-6),
            ],
        )
        speed = history["examples_per_second"][-1]
        self.assertAllClose(
            speed, 6 * ROWS / np.sum(clock.times), rtol=0.02, atol=0
        )
        self.assertAllClose(
            history["tokens_per_second"][-1], LENGTH * speed, rtol=1e-6
        )
        one = flops.training_flops(
            plain_model(), tf.TensorSpec((None, LENGTH), "int32")
        )
        tflops = history["tflops"][-1]
        self.assertAllClose(tflops, one * speed / num_devices / 1e12, rtol=1e-6)
        self.assertAllClose(history["mfu"][-1], tflops / 1e-6, rtol=1e-6)
        self.assertLess(history["input_wait"][-1], 0.3)
        # Python and TensorFlow alone take that.
        self.assertBetween(history["memory_gb"][-1], 0.2, 100.0)

    @parameterized.parameters("one", "mirrored", "mesh")
    @pytest.mark.crossing(every=3)
    def test_says_once_when_training_waits(self, strategy):
        with strategies.named(strategy).scope():
            model = _dense()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            history = model.fit(
                _dataset(60), epochs=3, verbose=2, callbacks=[Throughput()]
            )
        lines = printed.getvalue().splitlines()
        self.assertLen([n for n in lines if "wait for input" in n], 1)
        self.assertLen([n for n in lines if "`mfu`" in n], 1)
        self.assertGreater(min(history.history["input_wait"]), 0.3)
        self.assertNotIn("mfu", history.history)

    @parameterized.parameters("mirrored", "mesh")
    @pytest.mark.crossing(every=2)
    def test_no_wait_when_input_is_made_during_the_step(self, strategy):
        # A batch takes 100 ms, a step 120 ms or more: during each step arrives
        # a batch for a later one. On the CPU MeshStrategy takes no batch
        # ahead, so the dataset does.
        dataset = _made_on_demand(100)
        if strategy == "mesh":
            dataset = dataset.prefetch(2)
        with strategies.named(strategy).scope():
            model = _dense(120)
        history = model.fit(dataset, verbose=0, callbacks=[Throughput()])
        self.assertLess(history.history["input_wait"][0], 0.2)

    def test_no_wait_when_input_is_there(self):
        rows = tf.ones([4, 8])
        dataset = tf.data.Dataset.from_tensors((rows, rows))
        history = _dense(40).fit(
            dataset.repeat(20), verbose=0, callbacks=[Throughput()]
        )
        self.assertLess(history.history["input_wait"][0], 0.3)

    def test_other_callbacks_validation_and_traces_do_not_count(self):
        def stay(batch, logs=None):
            time.sleep(0.2)

        model = compiled(milliseconds=20)
        x = tokens(1, rows=2)
        logger = os.path.join(self.create_tempdir().full_path, "log.csv")
        history, _ = fit(
            model,
            validation_data=(x, x),
            callbacks=[
                keras.callbacks.CSVLogger(logger),
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=stay, on_test_batch_end=stay
                ),
                Throughput(),
            ],
        )
        # Below 20 that would be, with what stays in it.
        self.assertGreater(min(history["examples_per_second"]), 40.0)
        self.assertLess(max(history["examples_per_second"]), ROWS / 0.02)
        with open(logger) as file:
            self.assertIn("examples_per_second", file.readline())

    @parameterized.parameters(None, [[1, 2]], [[3, 1]])
    @pytest.mark.crossing(every=3)
    def test_ragged_batches_count_as_they_are(self, speeds):
        # Of 4, 4 and 2 rows, in 120 ms each; the last is traced anew. By speed
        # replicas have 1 + 3, 1 + 3, 1 + 1 rows, or 3 + 1, 3 + 1 and 2 + 0.
        strategy = mesh(data=2, speeds=speeds) if speeds else None
        model = compiled(strategy, milliseconds=120)
        x = np.ones((10, LENGTH), "int32")
        clock = Clock()
        history = model.fit(
            *(x, x),
            batch_size=ROWS,
            epochs=3,
            verbose=0,
            callbacks=[Throughput(), clock],
        ).history
        self.assertAllClose(
            history["examples_per_second"][-1],
            10 / np.sum(clock.times),
            rtol=0.02,
        )

    def test_epochs_of_one_step_have_no_figures_at_first(self):
        history, _ = fit(compiled(), batches=1, callbacks=[Throughput()])
        self.assertLen(history["loss"], 2)
        self.assertLen(history["examples_per_second"], 1)

    @pytest.mark.crossing
    def test_a_resumed_epoch_has_its_figures(self):
        path = self.create_tempdir().full_path

        def stop(batch, logs):
            if batch == 3:
                raise KeyboardInterrupt

        model = compiled(milliseconds=20)
        stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        make = lambda: BackupAndRestore(path, save_freq=1)  # noqa: E731
        with self.assertRaises(KeyboardInterrupt):
            fit(
                model,
                epochs=1,
                shuffle=False,
                callbacks=[make(), Throughput(), stopping],
            )
        clock = Clock()
        model = compiled(milliseconds=20)
        stopping.on_train_batch_begin = clock.on_train_batch_begin
        clock.times = []
        stopping.on_train_batch_end = clock.on_train_batch_end
        history, _ = fit(
            model,
            epochs=1,
            shuffle=False,
            callbacks=[make(), Throughput(), stopping],
        )
        times = clock.times[1:]
        self.assertLess(len(times), 4)
        self.assertAllClose(
            history["examples_per_second"][0],
            ROWS * len(times) / np.sum(times),
            rtol=0.05,
        )

    @pytest.mark.crossing
    def test_no_epoch_of_a_pipeline_is_begun_for_it(self):
        x = tokens(6)
        data = tfscale.data.pipeline(tfscale.data.arrays(x, x), batch_size=ROWS)
        for epoch, strategy in enumerate((None, mesh(data=2)), 1):
            compiled(strategy).fit(
                data, steps_per_epoch=4, verbose=0, callbacks=[Throughput()]
            )
            self.assertEqual(data.position.value[1:], (epoch, 0))

    @parameterized.parameters(None, "mesh")
    @pytest.mark.crossing(every=2)
    def test_weights_may_be_none(self, strategy):
        def batches():
            while True:
                yield np.ones((4, 8), "float32"), np.ones((4, 8)), None

        with strategies.named(strategy).scope():
            model = _dense()
        history = model.fit(
            batches(), steps_per_epoch=4, verbose=0, callbacks=[Throughput()]
        )
        self.assertLen(history.history["examples_per_second"], 1)

    @pytest.mark.crossing
    def test_a_line_says_what_is_left_out(self):
        class OwnStep(keras.Sequential):
            def train_step(self, data):
                return super().train_step(data)

        model = OwnStep(plain_model().layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        history, printed = fit(
            model, callbacks=[Throughput(peak_tflops=1.0)], verbose=2
        )
        self.assertNotIn("tflops", history)
        self.assertEqual(printed.count("No `tflops`"), 1)
        open_length = keras.Sequential(
            [
                keras.Input((None, 8)),
                keras.layers.Dense(8),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )
        open_length.compile("sgd", "mse")
        spec = (tf.TensorSpec((4, None, 8)), tf.TensorSpec((4, 8)))
        data = tf.data.Dataset.from_generator(
            lambda: ((np.ones((4, n, 8)), np.ones((4, 8))) for n in (3, 3, 5)),
            output_signature=spec,
        ).apply(tf.data.experimental.assert_cardinality(3))
        history = open_length.fit(data, verbose=0, callbacks=[Throughput()])
        self.assertNotIn("tflops", history.history)
        self.assertIn("examples_per_second", history.history)

    def test_nothing_is_printed_if_fit_is_silent(self):
        model = compiled(mesh(pipeline=2), wrap=piped)
        _, printed = fit(model, callbacks=[Throughput()])
        self.assertEmpty(printed)

    def test_the_bubble_of_a_pipeline_is_said(self):
        model = compiled(mesh(pipeline=2), wrap=piped)
        _, printed = fit(model, callbacks=[Throughput(1.0)], verbose=2)
        self.assertIn("wait for other stages", printed)

    def test_batches_of_unknown_size_are_said(self):
        strategy = mesh(data=2)
        x = tokens(6)

        def make(remainder):
            return strategy.distribute_datasets_from_function(
                lambda context: (
                    tf.data.Dataset.from_tensor_slices((x, x))
                    .batch(2, drop_remainder=remainder)
                    .repeat()
                )
            )

        model = compiled(strategy)
        arguments = {"steps_per_epoch": 4, "verbose": 0}
        with self.assertWarnsRegex(UserWarning, "drop_remainder"):
            history = model.fit(
                make(False), callbacks=[Throughput()], **arguments
            )
        self.assertNotIn("examples_per_second", history.history)
        clock = Clock()
        model = compiled(strategy, 30)
        history = model.fit(
            make(True),
            epochs=2,
            callbacks=[clock, Throughput()],
            **arguments,
        )
        self.assertAllClose(
            history.history["examples_per_second"][1],
            ROWS * 4 / np.sum(clock.times),
            rtol=0.02,
        )

    @parameterized.parameters(0, -1.0, float("nan"), float("inf"))
    def test_an_impossible_peak_is_refused(self, peak):
        with self.assertRaisesRegex(ValueError, f"peak_tflops={peak}"):
            Throughput(peak_tflops=peak)


if __name__ == "__main__":
    absltest.main()
