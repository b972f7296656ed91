import contextlib
import functools
import io
import json
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.executed_functions import executed_functions
from tfscale import selfcheck
from tfscale.mesh import timing
from tfscale.planner import DEVICES
from tfscale.planner import blocks
from tfscale.schedules.named_schedules import SCHEDULES


def _main(cases, *args, num_devices=4, kind="CPU"):
    """The exit code, and what it prints when it has only these cases."""
    out = io.StringIO()
    with (
        mock.patch.object(selfcheck, "cases", lambda n: cases(n)),
        mock.patch.object(
            selfcheck, "use_devices", lambda: (kind, num_devices)
        ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return selfcheck.main(list(args)), out.getvalue()


def build_model(norm=False):
    x = keras.Input((8,))
    h = keras.layers.Dense(8, "tanh")(x)
    if norm:
        h = keras.layers.BatchNormalization(name="norm")(h)
    model = keras.Model(x, keras.layers.Dense(2)(h))
    model.compile("sgd", "mse")
    return model


def build_differing():
    return build_model(norm=True)


def dataset():
    x = np.random.RandomState(0).rand(24, 8).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)


class ModelTest(parameterized.TestCase):
    @parameterized.parameters(("build_model", 0), ("build_differing", 1))
    @pytest.mark.crossing(every=2)
    def test_a_users_model_is_compared(self, name, expected):
        code, out = _main(
            lambda _: [("data", {"mesh": {"data": 2}})],
            f"--model={__name__}:{name}",
            f"--data={__name__}:dataset",
        )
        self.assertEqual(code, expected, out)
        self.assertRegex(out, "data .* differs" if code else "data .* works")
        self.assertEqual("norm" in out, bool(code))

    def test_both_must_be_given(self):
        for argument in ("--model=a:b", "--data=a:b"):
            with (
                contextlib.redirect_stderr(io.StringIO()) as err,
                self.assertRaises(SystemExit),
            ):
                selfcheck.main([argument])
            self.assertIn("together", err.getvalue())
        with self.assertRaisesRegex(ValueError, "module:name.*'a'"):
            selfcheck.found_in("a")


class CasesTest(parameterized.TestCase):
    @parameterized.parameters(2, 4, 8)
    def test_every_mesh_has_all_devices(self, num_devices):
        names = []
        for name, options in selfcheck.cases(num_devices):
            names.append(name)
            self.assertEqual(
                np.prod(list(options["mesh"].values())), num_devices, name
            )
        self.assertContainsSubset(
            [f"pipeline, {name}" for name in (*SCHEDULES, "pipedream")], names
        )
        self.assertLen(set(names), len(names))


class MainTest(parameterized.TestCase):
    @parameterized.parameters(
        (2, 2, "pipeline, gpipe"),
        (4, 2, "pipeline, zb_v"),
        (4, 4, "pipeline, pipedream", "all axes"),
    )
    @mock.patch.dict(timing.WIDTHS, CPU=256)
    @mock.patch.object(timing, "SECONDS", 0.0)
    @mock.patch.object(blocks, "_BLOCKS", 1)
    @pytest.mark.crossing(every=3)
    def test_what_works_is_as_near_as_it_says(
        self, num_blocks, num_devices, *names
    ):
        all_cases = dict(selfcheck.cases(num_devices))
        self.enter_context(
            mock.patch.object(selfcheck, "_MOST_STAGES", num_blocks)
        )
        code, out = _main(
            lambda _: ((name, all_cases[name]) for name in names),
            "--json",
            num_devices=num_devices,
        )
        self.assertEqual(code, 0, out)
        found = json.loads(out)
        for result in found["checks"]:
            self.assertEqual(result["status"], "works", result)
            self.assertBetween(result["difference"], 0, 1e-5)
        self.assertGreater(min(found["speed"].values()), 0)

    @mock.patch.object(selfcheck, "_MOST_STAGES", 1)  # a model of one block
    @mock.patch.object(selfcheck, "_XLA_WIDTH", 16)
    @mock.patch.object(selfcheck, "_XLA_STEPS", 3)
    @mock.patch.object(selfcheck, "measure_device")
    @pytest.mark.crossing
    def test_gpus_are_told_what_xla_gains(self, measure):
        measure.return_value = DEVICES["A100"]
        list_devices = tf.config.list_physical_devices
        physical = mock.patch.object(
            selfcheck.tf.config,
            "list_physical_devices",
            lambda *kind: [1, 2] if kind else list_devices(),
        )
        with physical, executed_functions() as functions:
            code, out = _main(lambda _: [], num_devices=2, kind="GPU")
        self.assertEqual(code, 0, out)
        found = re.search(
            r"XLA: .* ([\d.]+) ms of ([\d.]+) ms;.* is ([\d.e+-]+)",
            " ".join(out.split()),
        )
        compiled, uncompiled, difference = map(float, found.groups())
        self.assertGreater(min(compiled, uncompiled), 0)
        self.assertLess(difference, 1e-6)
        ops = [n.op for f in functions for graph in f for n in graph.node]
        self.assertIn("_XlaCompile", ops)

    @mock.patch.object(selfcheck, "_MOST_STAGES", 1)  # a model of one block
    @mock.patch.object(selfcheck, "measure_device")
    def test_no_check_begins_when_the_time_is_up(self, measure):
        measure.return_value = DEVICES["A100"]
        cases = [("one", {}), ("two", {})]
        code, out = _main(lambda _: cases, "--seconds=0")
        self.assertEqual(code, 0, out)
        self.assertRegex(out, r"2 others .* not tried")
        self.assertIn("one; two", out)
        self.assertNotIn("works", out)

    def test_cpus_without_the_flag_of_xla_are_not_said_to_compile(self):
        # The row said that it works, and nothing was compiled.
        run = functools.partial(selfcheck.train, {"data": 2}, jit=True)
        with mock.patch.dict(selfcheck.os.environ, TF_XLA_FLAGS=""):
            result = selfcheck.check("data, XLA", run, [])
        self.assertEqual(result.status, "not here")
        self.assertIn("TF_XLA_FLAGS=", result.why)

    def test_what_is_not_a_number_differs(self):
        # After a finite one, which `max` keeps.
        ones = [np.ones(2), np.ones(2)]
        result = selfcheck.check(
            "nan", lambda: [ones[0], ones[1] * np.nan], ones
        )
        self.assertEqual(result.status, "differs")
        # `json` wrote it as NaN, which is no JSON.
        self.assertIsNone(result.difference)
        self.assertIn("nan", result.why)

    def test_results_of_other_shapes_fail(self):
        # The comparison raised, and hid what the other checks had found.
        result = selfcheck.check("shapes", lambda: [np.ones(2)], [np.ones(3)])
        self.assertEqual(result.status, "fails")
        self.assertIn("ValueError", result.why)

    @mock.patch.object(selfcheck, "_MOST_STAGES", 1)  # a model of one block
    @mock.patch.object(selfcheck, "measure_device")
    def test_what_fails_hides_nothing_and_is_said(self, measure):
        measure.return_value = DEVICES["A100"]
        code, out = _main(
            lambda _: [("wrong", {"mesh": {"data": 99}}), ("one", {})]
        )
        self.assertEqual(code, 1)
        self.assertRegex(out, r"(?s)wrong .* fails .* one .* works")
        self.assertRegex(out, r"wrong, fails: \w+Error: ")

    @mock.patch.object(selfcheck, "_MOST_STAGES", 1)  # a model of one block
    @mock.patch.object(selfcheck, "measure_device")
    def test_a_measurement_that_fails_hides_no_check(self, measure):
        # On GPUs that are split it did: they had too little memory.
        error = tf.errors.ResourceExhaustedError(None, None, "too large")
        measure.side_effect = error
        code, out = _main(lambda _: [("one", {})])
        self.assertEqual(code, 1)
        self.assertRegex(out, r"(?s)speed .* fails .* one .* works")
        self.assertIn("speed, fails: ResourceExhaustedError: too large", out)

    def test_other_numbers_differ(self):
        result = selfcheck.check(
            "name", lambda: [np.array([1.0, 2.0])], [np.array([1.0, 2.1])]
        )
        self.assertEqual(result.status, "differs")
        self.assertAlmostEqual(result.difference, 0.1 / 2.1)

    def test_one_gpu_is_split_and_several_are_not(self):
        config = selfcheck.tf.config
        for gpus, used in {0: 4, 1: 4, 2: 2, 7: 4, 8: 8, 16: 8}.items():
            with (
                mock.patch.object(config, "list_physical_devices") as physical,
                mock.patch.object(config, "list_logical_devices") as logical,
                mock.patch.object(
                    selfcheck.tfscale, "use_virtual_devices"
                ) as split,
            ):
                physical.return_value = [None] * gpus
                logical.return_value = [None] * (gpus if gpus > 1 else 4)
                found = selfcheck.use_devices()
            self.assertEqual(split.called, gpus < 2)
            self.assertEqual(found, ("GPU" if gpus else "CPU", used))


if __name__ == "__main__":
    absltest.main()
