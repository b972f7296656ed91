"""`tfscale.benchmark` times real processes, and says why one has failed."""

import functools
import json
import sys
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

ROWS, SLEEP = 12, 0.1


def build_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def not_compiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def dataset():
    return tf.data.Dataset.from_tensors((np.ones((ROWS, 4)), np.ones(ROWS)))


def replicas():
    tfscale.use_virtual_devices(2)
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


class Sleeping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(SLEEP)


class SleepingModel(keras.Sequential):
    def fit(self, *args, callbacks=(), **kwargs):
        return super().fit(*args, callbacks=[Sleeping(), *callbacks], **kwargs)


def slow(model):
    slow_model = SleepingModel(model.layers)
    slow_model.compile("sgd", "mse")
    return slow_model


def slow_replicas():
    return replicas(), slow


def broken():
    raise ValueError("there is no such mesh")


def workers():
    tfscale.use_virtual_devices(1)
    tfscale.initialize()
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


def stuck():
    time.sleep(1000)


class BenchmarkTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Its processes need not import TensorFlow once more.
        self.enter_context(
            mock.patch.object(sys, "executable", forked_python.executable())
        )

    def test_times_of_steps_that_are_known(self):
        report = tfscale.benchmark(
            build_model,
            dataset,
            {"slow": slow_replicas, "broken": broken},
            steps=2,
            rounds=2,
        )
        plain, slowed, failed = report.timings
        self.assertEqual(
            [timing.name for timing in report.timings],
            ["one device", "slow", "broken"],
        )
        self.assertBetween(slowed.step_seconds, SLEEP, 5 * SLEEP)
        self.assertLess(plain.step_seconds, SLEEP)
        self.assertAlmostEqual(
            slowed.examples_per_second * slowed.step_seconds, ROWS
        )
        self.assertLen(slowed.speedups, 2)
        self.assertLess(max(slowed.speedups), 1)
        for timing in (plain, slowed):
            self.assertGreater(timing.first_step_seconds, timing.step_seconds)
            self.assertBetween(timing.memory_bytes, 1e8, 4e9)
        self.assertIn("there is no such mesh", failed.error)
        rows = json.loads(report.to_json())
        self.assertEqual(rows[1]["step_seconds"], slowed.step_seconds)
        self.assertIsNone(rows[2]["step_seconds"])
        self.assertIn("there is no such mesh", report.table())

    @parameterized.parameters(("not compiled",), ("workers",), ("stuck",))
    @pytest.mark.crossing(every=3)
    def test_of_other_processes(self, case):
        run = functools.partial(
            tfscale.benchmark, dataset=dataset, steps=1, rounds=1
        )
        if case == "not compiled":
            with self.assertRaisesRegex(RuntimeError, "compiled"):
                run(not_compiled, strategies={"replicas": replicas})
        elif case == "workers":
            report = run(
                build_model,
                strategies={"workers": workers},
                launch={"workers": ["--num_workers=2"]},
            )
            self.assertIsNone(report.timings[1].error)
            self.assertLen(report.timings[1].speedups, 1)
        else:
            report = run(build_model, strategies={"stuck": stuck}, timeout=40)
            self.assertIn("40", report.timings[1].error)

    @parameterized.parameters(
        ({"build_model": lambda: None}, ValueError, "build_model"),
        ({"build_model": "a model"}, TypeError, "build_model"),
        ({"dataset": 3}, TypeError, "dataset"),
        ({"strategies": {}}, ValueError, "strategies"),
        ({"strategies": {"one device": replicas}}, ValueError, "one device"),
        ({"strategies": {"a": "data=2"}}, TypeError, "strategies"),
        ({"launch": {"b": ["--num_workers=2"]}}, ValueError, "launch"),
        ({"one_device": 3}, TypeError, "one_device"),
        ({"steps": 0}, ValueError, "steps"),
        ({"rounds": 1.5}, TypeError, "rounds"),
    )
    def test_bad_arguments(self, changed, error, text):
        arguments = {
            "build_model": build_model,
            "dataset": dataset,
            "strategies": {"replicas": replicas},
            **changed,
        }
        with self.assertRaisesRegex(error, text):
            tfscale.benchmark(**arguments)

    def test_a_model_in_place_of_a_function_is_refused(self):
        with self.assertRaisesRegex(TypeError, "build_model.*Sequential"):
            tfscale.benchmark(
                keras.Sequential(), dataset, {"replicas": replicas}
            )


if __name__ == "__main__":
    absltest.main()
