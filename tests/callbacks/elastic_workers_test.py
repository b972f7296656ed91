"""A run whose number of workers changes is the run of one device."""

import itertools
import json
import os
import tempfile
import types
from unittest import mock

import keras
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import tfscale
from tests import forked_python
from tests.backup.jobs import assert_close
from tests.callbacks import elastic_program
from tests.source_files import REPOSITORY
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import ElasticWorkers
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import GradientNoiseScale
from tfscale.callbacks import elastic_workers
from tfscale.cluster.elastic import ElasticGroup

_SECONDS = 400


class RealWorkersTest(absltest.TestCase):
    def test_of_two_less_one_then_four_then_one(self):
        with tempfile.TemporaryDirectory() as folder:
            said = forked_python.output(
                [
                    *("-m", "tfscale.launch", "--num_workers=2"),
                    *("--min_workers=1", "--max_workers=4"),
                    *("--devices_per_worker=1", "--grace_seconds=5", "-m"),
                    *("tests.callbacks.elastic_program", folder),
                ],
                cwd=REPOSITORY,
                timeout=_SECONDS,
            )
            with open(f"{folder}/found") as file:
                counts, found, expected = json.load(file)
        with self.subTest("each epoch has its workers, less one that is lost"):
            first = counts.index(1)
            self.assertBetween(first, 1, 4)
            self.assertEqual(
                counts, [2] * first + [1] * (6 - first) + [4] * 6 + [1] * 6
            )
            self.assertEqual(said.count("as the first"), 1)
        with self.subTest("each record of an epoch once"):
            numbers = np.arange(1.0, elastic_program.ROWS + 1) / 64
            for power in (1, 2):
                once = float(np.sum(numbers**power))
                self.assertEqual(
                    found["history"][f"total_{power}"],
                    [once] * elastic_program.EPOCHS,
                )
        with self.subTest("the numbers of one device"):
            for value, other in zip(
                found["weights"], expected["weights"], strict=True
            ):
                assert_close(value, other, 1e-6)
            assert_close(
                found["history"]["loss"], expected["history"]["loss"], 1e-6
            )


class PlanTest(parameterized.TestCase):
    """In one process, to which the environment says what it is."""

    def setUp(self):
        super().setUp()
        self.path = self.create_tempdir().full_path

    def fit(
        self,
        plan,
        *others,
        group=None,
        size=8,
        make_optimizer=lambda: keras.optimizers.SGD(0.1),
        y=1.0,
        **options,
    ):
        environ = ElasticGroup(*group).to_environ() if group else {}
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(), "mse")
        rows = tfscale.data.arrays(np.ones((24, 3)), y * np.ones((24, 1)))
        with mock.patch.dict(os.environ, environ):
            model.fit(
                tfscale.data.pipeline(rows, batch_size=size, seed=1),
                epochs=3,
                verbose=0,
                callbacks=[ElasticWorkers(plan, **options), *others],
            )
        return model

    def backup(self):
        return BackupAndRestore(self.path)

    @parameterized.parameters(
        (dict(plan={1: 2}), "Received: plan={1: 2}"),
        (dict(plan="best"), "Received: plan='best'"),
        (dict(plan={0: 0}), "Received: plan=0"),
        (dict(plan={-1: 2, 0: 1}), "Received: plan=-1"),
        (dict(plan={0: 2.5}), r"Received: plan=2\.5"),
        (dict(plan={0: 1}, learning_rate="cubic"), "learning_rate='cubic'"),
    )
    def test_arguments_that_make_no_sense(self, arguments, message):
        with self.assertRaisesRegex((TypeError, ValueError), message):
            ElasticWorkers(**arguments)

    @parameterized.parameters(
        (None, {0: 1}, {}, "started without a range"),
        ((1, 4, 1, 1), {0: 1, 2: 5}, {}, r"\[5\] outside .*1 to .*=4"),
        ((2, 4, 2, 2), {0: 1, 2: 3}, {}, r"\[1\] outside .*2 to .*=4"),
        ((1, 99, 1, 1), {0: 1, 2: 64}, {}, r"\[64\] outside .*1 to .*=63"),
        ((1, 4, 1, 1), {0: 1, 2: 3}, {}, r"batch_size=8, which \[3\] workers"),
        ((1, 4, 1, 1), {0: 1}, dict(learning_rate="adascale"), "without Grad"),
        (
            (1, 4, 1, 1),
            {0: 1},
            dict(
                learning_rate="sqrt",
                make_optimizer=lambda: keras.optimizers.SGD(
                    keras.optimizers.schedules.CosineDecay(0.1, 10)
                ),
            ),
            "an optimizer with a schedule",
        ),
    )
    def test_what_cannot_train_is_refused(self, group, plan, options, message):
        with self.assertRaisesRegex(ValueError, message):
            self.fit(plan, self.backup(), group=group, **options)
        self.assertEmpty([n for n in os.listdir(self.path) if "backup" in n])

    def test_it_needs_a_backup(self):
        with self.assertRaisesRegex(ValueError, "without BackupAndRestore"):
            self.fit({0: 1}, group=(1, 4, 1, 1))

    def test_two_that_adapt_the_learning_rate_are_refused(self):
        noise = GradientNoiseScale(batch_sizes=(4, 32), learning_rate="sqrt")
        with self.assertRaisesRegex(ValueError, "learning_rate='linear'"):
            self.fit(
                {0: 1},
                *(self.backup(), noise, GradientAccumulation(2)),
                group=(1, 4, 1, 1),
                learning_rate="linear",
            )

    def test_a_wrong_number_at_the_start_is_none_with_work(self):
        # Of a launcher that was told another one than the plan's first.
        with self.assertRaises(SystemExit) as ended:
            self.fit({0: 2}, self.backup(), group=(1, 4, 1, 1))
        self.assertEqual(ended.exception.code, 192 + 2)
        self.assertEmpty([n for n in os.listdir(self.path) if "backup" in n])

    @parameterized.parameters(
        ("linear", 0.2), ("sqrt", 0.1 * 2**0.5), (None, 0.1)
    )
    @pytest.mark.crossing(every=3)
    def test_the_learning_rate_follows_the_batch_size(self, rule, expected):
        plan = {0: 1, 1: 2}
        options = dict(learning_rate=rule)
        with self.assertRaises(SystemExit) as ended:
            self.fit(plan, self.backup(), group=(1, 2, 1, 1), **options)
        self.assertEqual(ended.exception.code, 192 + 2)
        two = dict(group=(1, 2, 2, 2), size=16)
        model = self.fit(plan, self.backup(), **two, **options)
        self.assertAlmostEqual(
            float(model.optimizer.learning_rate.numpy()), expected, 6
        )

    @pytest.mark.crossing
    def test_the_learning_rate_follows_the_noise(self):
        def others():
            noise = GradientNoiseScale()
            return self.backup(), noise, GradientAccumulation(2)

        plan = {0: 1, 1: 2}
        draw = np.random.RandomState(0).randn(24, 1)
        options = dict(learning_rate="adascale", y=draw)
        with self.assertRaises(SystemExit):
            self.fit(plan, *others(), group=(1, 2, 1, 1), **options)
        model = self.fit(
            plan, *others(), group=(1, 2, 2, 2), size=16, **options
        )
        # Between none and the ratio of the batch sizes.
        rate = float(model.optimizer.learning_rate.numpy())
        self.assertBetween(rate, 0.105, 0.199)

    def test_the_number_follows_the_goodput(self):
        # Two are tried, take longer, and are given up.
        for group, seconds, code in (
            ((1, 4, 1, 1), 1.0, 192 + 2),
            ((1, 4, 2, 2), 1.5, 192 + 1),
            ((1, 4, 1, 1), 1.0, 0),
        ):
            ticks = itertools.count(step=seconds)
            clock = types.SimpleNamespace(monotonic=ticks.__next__)
            with (
                self.subTest(str(group)),
                mock.patch.object(elastic_workers, "time", clock),
                self.assertRaises(SystemExit) as ended,
            ):
                self.fit("goodput", self.backup(), group=group)
                raise SystemExit(0)
            self.assertEqual(ended.exception.code, code)

    def test_those_left_of_a_lost_worker_end_the_epoch(self):
        # It is taken back where the next one begins.
        with self.assertRaises(SystemExit) as ended:
            self.fit({0: 2}, self.backup(), group=(1, 2, 1, 2))
        self.assertEqual(ended.exception.code, 192 + 2)
        with self.assertRaises(SystemExit) as ended:
            self.fit({0: 2}, self.backup(), group=(1, 2, 1, 2))
        steps = [int(n.split("-")[1]) for n in os.listdir(self.path)
                 if n.startswith("backup")]  # fmt: skip
        self.assertEqual(max(steps), 2 * 3)
        self.fit({0: 2}, self.backup(), group=(1, 2, 2, 2))


if __name__ == "__main__":
    absltest.main()
