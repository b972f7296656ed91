import glob
import itertools
import json
import os
import re
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale._internals import symbols
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import Profile
from tfscale.pipeline.running import measure
from tfscale.profiling import planes
from tfscale.profiling.breakdown import shares

ROWS = 8
WIDTH = 16
SIZE = 1024


class Slow(keras.layers.Layer):
    """Takes its time forward and backward, and leaves its input as it is."""

    def __init__(self, forward, backward=0.0, **kwargs):
        super().__init__(**kwargs)
        self._seconds = forward, backward

    def call(self, x):
        def sleep(x, seconds):
            def wait(x):
                time.sleep(seconds)
                return x

            y = tf.numpy_function(wait, [x], x.dtype)
            return tf.ensure_shape(y, x.shape)

        forward, backward = self._seconds

        @tf.custom_gradient
        def slow(x):
            return sleep(x, forward), lambda dy: sleep(dy, backward)

        return slow(x)

    def compute_output_shape(self, shape):
        return shape


class Products(keras.layers.Layer):
    """Adds 0 after a number of matrix products in a row."""

    def __init__(self, number, **kwargs):
        super().__init__(**kwargs)
        self._number = number

    def build(self, shape):
        self.kernel = self.add_weight(shape=(SIZE, SIZE), initializer="zeros")

    def call(self, x):
        y = tf.repeat(x, SIZE // WIDTH, axis=1)
        for _ in range(self._number):
            y = tf.matmul(self.kernel, y, transpose_b=True)
            y = tf.transpose(y)
        return x + y[:, :WIDTH]

    def compute_output_shape(self, shape):
        return shape


def trained(profile, mesh=None, layers=(), epochs=1, wait=0.0, **kwargs):
    """Trains for 8 steps an epoch; the model and its history."""
    strategy = tf.distribute.get_strategy()
    if mesh is not None:
        grid = tfscale.device_mesh(**mesh)
        layout_map = None
        if "model" in mesh:
            layout_map = keras.distribution.LayoutMap(grid)
            layout_map[".*layer_[02]/kernel"] = (None, "model")
            layout_map[".*layer_[02]/bias"] = ("model",)
            layout_map[".*layer_[13]/kernel"] = ("model", None)
        strategy = tfscale.MeshStrategy(grid, layout_map)
    with strategy.scope():
        inputs = keras.Input((WIDTH,))
        layers = layers or [
            keras.layers.Dense(WIDTH, name=f"layer_{i}") for i in range(4)
        ]
        model = keras.Sequential([inputs, *layers])
        if mesh is not None and "pipeline" in mesh:
            model = tfscale.PipelineModel(model, num_microbatches=4)
        compile_args = {
            k: kwargs.pop(k) for k in ("steps_per_execution",) if k in kwargs
        }
        model.compile("sgd", "mse", **compile_args)
    x = np.ones((8 * ROWS, WIDTH), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(ROWS)
    if wait:

        def sleep(x, y):
            def asleep(x):
                time.sleep(wait)
                return x

            x = tf.ensure_shape(
                tf.numpy_function(asleep, [x], tf.float32), (None, WIDTH)
            )
            return x, y

        options = tf.data.Options()  # The next batch is not read ahead.
        options.experimental_optimization.inject_prefetch = False
        data = data.map(sleep).with_options(options)
    callbacks = [profile, *kwargs.pop("callbacks", ())]
    history = model.fit(
        data,
        epochs=epochs,
        callbacks=callbacks,
        **{"verbose": 0, **kwargs},
    )
    return model, history.history


class ProfileTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self):
        super().setUp()
        tfscale.use_virtual_devices(8)

    def test_known_waits_have_their_shares(self):
        # A batch takes 200 ms, a forward 300 ms and a backward 100 ms.
        profile = Profile((3, 7))
        layers = [
            keras.layers.Dense(WIDTH, name="plain"),
            Slow(0.3, 0.1, name="slow"),
            keras.layers.Dense(WIDTH),
        ]
        trained(profile, layers=layers, wait=0.2)
        (found,) = profile.shares.values()
        self.assertAllClose(found.compute, 2 / 3, rtol=0, atol=0.02)
        self.assertAllClose(found.input_wait, 1 / 3, rtol=0, atol=0.02)
        self.assertAllClose(found.idle, 1 / 3, rtol=0, atol=0.02)
        name, times = next(iter(profile.layers.items()))
        self.assertEqual(name, "slow")
        self.assertAllClose(times[0], 0.3, rtol=0.02)

    def test_bubble_agrees_with_timelines(self):
        # Of one step that both measure, so that nothing else differs.
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        with strategy.scope():
            layers = [
                Products(10, name="first"),
                keras.layers.Dense(WIDTH),
                Products(30, name="second"),
                keras.layers.Dense(WIDTH),
            ]
            model = tfscale.PipelineModel(
                keras.Sequential([keras.Input((WIDTH,)), *layers]), 4
            )
            model.compile("sgd", "mse")
        x = np.ones((ROWS, WIDTH), "float32")
        self.enter_context(mock.patch.object(measure, "_UNMEASURED", 0))
        self.enter_context(mock.patch.object(measure, "_MEASURED", 1))
        # One step alone may be interrupted between two of its operations.
        steps = [self._bubbles_of_both(model, x) for _ in range(9)]
        differences = [np.subtract(*of_both) for of_both in steps]
        self.assertAllClose(
            np.median(differences, axis=0), [0.0, 0.0], atol=0.02, rtol=0
        )

    def _bubbles_of_both(self, model, x):
        """The bubbles of both devices in a step: profiled, and in timelines."""
        folder = self.create_tempdir().full_path
        with (
            tf.profiler.experimental.Profile(folder),
            tf.profiler.experimental.Trace(planes.STEP, step_num=0, _r=1),
        ):
            spans = model.timelines(x, x)["measured"]
        (path,) = glob.glob(os.path.join(folder, "plugins/profile/*/*.pb"))
        space = symbols.xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        recording = planes.read_space(space, lambda a, b: "pipeline")
        devices = ["task:0/CPU:0", "task:0/CPU:1"]
        found = shares(recording, [devices])
        end = max(span.end for span in spans)
        # The step is as long as in `timelines`, without the trace of it.
        ((begin, stop),) = recording.steps
        scale = 1e-12 * (stop - begin) / end
        busy = [
            sum(s.end - s.start for s in spans if s.device == index)
            for index in range(len(devices))
        ]
        return (
            [found[device].bubble * scale for device in devices],
            [1 - each / end for each in busy],
        )

    @parameterized.parameters(
        (None,),
        ({"data": 2},),
        ({"model": 2},),
        ({"pipeline": 2},),
        ({"data": 2, "pipeline": 2},),
    )
    def test_every_mesh(self, mesh):
        folder = self.create_tempdir().full_path
        profile = Profile((4, 6), folder)
        _, logs = trained(profile, mesh)
        size = int(np.prod(list((mesh or {}).values())))
        self.assertLen(profile.shares, size)
        axes = set()
        for each in profile.shares.values():
            axes |= set(each.communication)
            self.assertAllClose(
                each.compute + each.communicating - each.both + each.idle, 1.0
            )
            self.assertGreater(each.compute, 0)
        self.assertContainsSubset(axes, {*(mesh or ()), "host", "several"})
        self.assertContainsSubset(set(mesh or ()), axes)
        self.assertEqual(set(profile.layers), {f"layer_{i}" for i in range(4)})
        self.assertTrue(all(min(t) > 0 for t in profile.layers.values()))
        self.assertLen(logs["profile_idle"], 1)
        for text in (*profile.shares, "layer_0", "2 steps"):
            self.assertIn(text, profile.table())
        with open(os.path.join(folder, "timeline.json")) as file:
            self.assertNotEmpty(json.load(file)["traceEvents"])
        self.assertLen(
            glob.glob(os.path.join(folder, "plugins/profile/*/*.xplane.pb")), 1
        )

    @pytest.mark.crossing
    def test_whole_executions_and_accumulation(self):
        # In a folder as Hydra names it, no recording was found.
        folder = os.path.join(self.create_tempdir(), "lr=[0.1]")
        profile = Profile((3, 5), log_dir=folder)
        trained(profile, {"data": 2}, steps_per_execution=4)
        self.assertIn("8 steps", profile.table())
        profile = Profile((9, 11))
        trained(
            profile,
            {"data": 2},
            epochs=2,
            callbacks=[GradientAccumulation(2)],
        )
        self.assertIn("2 steps", profile.table())

    def test_steps_that_never_come_are_said(self):
        for steps, done in (((20, 22), 0), ((6, 12), 2)):
            lines = []
            with self.subTest(steps=steps):
                with mock.patch("builtins.print", lines.append):
                    profile = Profile(steps)
                    trained(profile)
                self.assertRegex(
                    lines[-1], rf"8 steps.*\({steps[0]}.*that {done} were"
                )
                self.assertEqual(bool(profile.shares), bool(done))

    def test_a_tensorboard_that_does_not_profile(self):
        folder = self.create_tempdir().full_path
        for first in (True, False):
            profile = Profile((3, 5))
            board = keras.callbacks.TensorBoard(folder, profile_batch=0)
            callbacks = [profile, board] if first else [board, profile]
            # TensorBoard, which writes them, need not be installed.
            with mock.patch.object(board.summary, "scalar"):
                trained(callbacks[0], {"data": 2}, callbacks=callbacks[1:])
            self.assertLen(profile.shares, 2)

    def test_one_profiler_at_a_time(self):
        tf.profiler.experimental.start(self.create_tempdir().full_path)
        try:
            with self.assertRaisesRegex(ValueError, r"steps=\(10, 12\)"):
                trained(Profile())
        finally:
            tf.profiler.experimental.stop(save=False)
        with self.assertRaisesRegex(ValueError, "several `Profile`"):
            trained(Profile(), callbacks=[Profile((1, 2))])
        folder = self.create_tempdir().full_path
        for batch, profile in itertools.product((3, (20, 30)), (1, 0)):
            begun = keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: self.fail("trains")
            )
            tensorboard = keras.callbacks.TensorBoard(
                folder, profile_batch=batch
            )
            others = [begun, tensorboard, Profile((1, 2))]
            with self.assertRaisesRegex(ValueError, "`profile_batch`"):
                trained(others.pop(-1 - profile), callbacks=others)
        with tf.profiler.experimental.Profile(
            self.create_tempdir().full_path
        ):  # It was not left running.
            pass

    @parameterized.parameters((None,), ({"data": 2},), ({"pipeline": 2},))
    @pytest.mark.crossing(every=3)
    def test_mfu_is_of_the_steps_and_the_peak(self, mesh):
        peak = 1e-3
        profile = Profile((4, 6), peak_tflops=peak)
        _, logs = trained(profile, mesh)
        seconds = float(re.search(r"of ([\d.]+) ms", profile.table())[1]) / 1e3
        # Forward and two gradients of each layer; the first has one.
        flops = ROWS * (3 * 4 - 1) * 2 * WIDTH**2
        devices = len(profile.shares)
        expected = flops / seconds / devices / (peak * 1e12)
        self.assertAllClose(profile.mfu, expected, rtol=0.01)
        self.assertEqual(logs["profile_mfu"], [profile.mfu])
        self.assertIn(f"MFU {profile.mfu:.1%}", profile.table())

    @parameterized.parameters(0, -1.0, float("nan"), float("inf"))
    def test_an_impossible_peak_is_refused(self, peak):
        with self.assertRaisesRegex(ValueError, f"peak_tflops={peak}"):
            Profile(peak_tflops=peak)

    def test_each_of_two_workers_writes_what_its_devices_did(self):
        folder = self.create_tempdir().full_path
        said = forked_python.output(
            [
                *("-m", "tfscale.launch", "--num_workers=2"),
                *("--devices_per_worker=2", "-m"),
                *("tests.callbacks.profile_program", folder),
            ],
            cwd=REPOSITORY,
            timeout=300,
        )
        found = []
        for index in range(2):
            worker = f"{folder}/worker_{index}"
            with open(f"{worker}/timeline.json") as file:
                self.assertNotEmpty(json.load(file)["traceEvents"])
            pattern = f"{worker}/plugins/profile/*/*.xplane.pb"
            self.assertLen(glob.glob(pattern), 1)
            with open(f"{folder}/{index}.json") as file:
                found.append(json.load(file))
        for index, (devices, layers, logs) in enumerate(found):
            self.assertLen(devices, 2)
            for device, compute in devices.items():
                self.assertIn(f"task:{index}", device)
                self.assertGreater(compute, 0)
            self.assertEqual(layers, [f"layer_{i}" for i in range(4)])
            self.assertIn("profile_communication", logs)
        # The first one prints the table, of two steps.
        self.assertLen(re.findall("2 steps of", said), 1)
        self.assertRegex(said, r"worker 0\].*2 steps of")

    @parameterized.parameters(
        ((2, 2), ValueError),
        ((3, 2), ValueError),
        ((-1, 2), ValueError),
        ((1,), ValueError),
        ((1.0, 2), TypeError),
        ((True, 2), TypeError),
        (3, TypeError),
    )
    def test_steps_that_make_no_sense(self, steps, error):
        with self.assertRaisesRegex(error, "Received: steps"):
            Profile(steps)


if __name__ == "__main__":
    absltest.main()
