"""Devices of unequal speed have the numbers of one device."""

import math
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.interruption import Interrupt
from tests.interruption import Interrupted
from tests.mesh import workers_rows
from tfscale.callbacks import BackupAndRestore
from tfscale.mesh import timing
from tfscale.mesh.speeds import speeds_by
from tfscale.variables import zero

X, Y, WEIGHTS = workers_rows.X, workers_rows.Y, workers_rows.WEIGHTS
NAN = float("nan")


def strategy_of(*speeds, **options):
    mesh = tfscale.device_mesh(data=len(speeds), speeds=speeds)
    return tfscale.MeshStrategy(mesh, **options)


def parts(strategy, dataset):
    """The rows of each replica in each step."""
    distributed = strategy.experimental_distribute_dataset(dataset)
    return [
        [part.numpy().tolist() for part in step.values] for step in distributed
    ]


def weighted():
    return dict(
        metrics=["mae", keras.metrics.RootMeanSquaredError(name="root")],
        weighted_metrics=[keras.metrics.MeanSquaredError(name="weighted")],
    )


def normalized():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, use_bias=False, name="a")(x)
    h = keras.layers.BatchNormalization(
        name="all", synchronized=True, momentum=0.6, epsilon=0.1
    )(h)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def deep():
    x = h = keras.Input((5,))
    for n in range(5):
        h = keras.layers.Dense(5, activation="tanh", name=f"d{n}")(h)
    return keras.Model(x, keras.layers.Dense(3, name="last")(h))


def job(build=workers_rows.dense, compile=dict, fit=None, **data):
    # 15 rows: two batches of 7, and a row that the faster device takes.
    data = dict(x=X, y=Y, batch_size=7, epochs=2, **data)
    return same_numbers.Job(build, data, compile=compile, fit=fit or {})


JOBS = {
    "dense": job(),
    "weights": job(compile=weighted, sample_weight=WEIGHTS),
    "normalization": job(normalized),
    "validation": job(validation_data=(X[:8], Y[:8])),
    "deep": job(deep),
    "window": job(compile=lambda: dict(steps_per_execution=2)),
}


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


class RowsTest(parameterized.TestCase):
    def test_are_in_order_and_as_many_as_the_speed(self):
        data = tf.data.Dataset.range(14).batch(6)
        self.assertEqual(
            parts(strategy_of(1, 2), data),
            [
                [[0, 1], [2, 3, 4, 5]],
                [[6, 7], [8, 9, 10, 11]],
                [[12], [13]],
            ],
        )

    def test_a_batch_does_not_run_into_the_next_one(self):
        data = tf.data.Dataset.range(4).batch(3).repeat(2)
        expected = [[[0], [], [1, 2]], [[], [], [3]]]
        found = parts(strategy_of(1, 0.5, 2), data)
        self.assertEqual(found, 2 * expected)

    def test_rows_of_any_kind(self):
        data = tf.data.Dataset.from_tensors(
            {
                "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5], [6]]),
                "sparse": tf.sparse.from_dense(np.eye(6, 3, dtype="float32")),
                "texts": tf.constant([*"abcdef"]),
            }
        )
        (step,) = strategy_of(1, 2).experimental_distribute_dataset(data)
        first, second = step["ragged"].values
        self.assertEqual(first.to_list(), [[1], [2, 3]])
        self.assertEqual(second.to_list(), [[], [4], [5], [6]])
        dense = [tf.sparse.to_dense(x).numpy() for x in step["sparse"].values]
        self.assertEqual([len(x) for x in dense], [2, 4])
        np.testing.assert_array_equal(np.concatenate(dense), np.eye(6, 3))
        texts = [x.numpy().tolist() for x in step["texts"].values]
        self.assertEqual(texts, [[b"a", b"b"], [b"c", b"d", b"e", b"f"]])

    @parameterized.parameters("FILE", "OFF")
    def test_one_process_reads_all_files(self, policy):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy
        )
        folder = self.create_tempdir()
        files = [
            folder.create_file(name, content=name).full_path for name in "abc"
        ]
        data = tf.data.TextLineDataset(files).batch(3).with_options(options)
        found = parts(strategy_of(1, 2), data)
        self.assertEqual(found, [[[b"a"], [b"b", b"c"]]])

    def test_equal_speeds_are_none(self):
        data = tf.data.Dataset.range(5).batch(4)
        self.assertEqual(
            parts(strategy_of(3, 3), data),
            parts(
                tfscale.MeshStrategy(tfscale.device_mesh(data=2)),
                data,
            ),
        )

    def test_refuses_batches_of_a_function_and_data_without_rows(self):
        strategy = strategy_of(1, 2)
        with self.assertRaisesRegex(ValueError, r"speeds=\[1.0, 2.0\]"):
            strategy.distribute_datasets_from_function(
                lambda context: tf.data.Dataset.range(4).batch(2)
            )
        with self.assertRaisesRegex(ValueError, r"shape=\(\)"):
            strategy.experimental_distribute_dataset(tf.data.Dataset.range(4))


class SameNumbersTest(parameterized.TestCase):
    def check(self, job, found):
        expected = same_numbers.on_one_device(job)
        same_numbers.assert_same(self, expected, found)
        for purpose in ("evaluate", "predict"):
            arguments = (X, Y) if purpose == "evaluate" else (X,)
            # The order of rows, with parts of 2 + 5 and 0 + 1.
            a, b = (
                getattr(each.model, purpose)(
                    *arguments, batch_size=7, verbose=0
                )
                for each in (expected, found)
            )
            same_numbers.assert_close(b, a, purpose)

    @parameterized.product(name=tuple(JOBS), speeds=((1, 2), (3, 0.5, 1)))
    @pytest.mark.crossing(every=12)
    def test_of_replicas(self, name, speeds):
        job = JOBS[name]
        self.check(job, same_numbers.plain(job, strategy_of(*speeds)))

    @parameterized.parameters(1, 2, 3)
    @mock.patch.object(zero, "MIN_ELEMENTS", 8)
    @pytest.mark.crossing
    def test_with_a_zero_stage(self, stage):
        job = JOBS["weights"]
        strategy = strategy_of(1, 2, zero_stage=stage)
        self.check(job, same_numbers.plain(job, strategy))

    @parameterized.parameters(False, True)
    @pytest.mark.crossing
    def test_of_accumulated_gradients(self, jit_compile):
        accumulated = job(
            compile=lambda: dict(jit_compile=jit_compile),
            fit=dict(callbacks=[tfscale.callbacks.GradientAccumulation(2)]),
        )
        found = same_numbers.plain(accumulated, strategy_of(1, 2))
        self.check(JOBS["dense"], found)

    @pytest.mark.crossing
    def test_of_a_pipeline_on_each_replica(self):
        found = same_numbers.on_mesh(
            JOBS["weights"], 1, 2, num_replicas=2, speeds=[1, 2]
        )
        self.check(JOBS["weights"], found)

    @parameterized.parameters("generator", "PyDataset", "unknown size")
    @pytest.mark.crossing(every=3)
    def test_of_data(self, kind):
        batches = [(X[n : n + 7], Y[n : n + 7]) for n in (0, 7, 14)]
        spec = tuple(
            tf.TensorSpec([None, width], tf.float32) for width in (5, 3)
        )

        def make():
            if kind == "generator":
                return (batches[n % 3] for n in range(6))
            if kind == "PyDataset":
                return Batches(batches)
            data = tf.data.Dataset.from_generator(
                lambda: iter(batches), output_signature=spec
            )
            return data.apply(tf.data.experimental.assert_cardinality(3))

        fit = dict(epochs=2, steps_per_epoch=3, shuffle=False, verbose=0)
        if kind == "unknown size":
            del fit["steps_per_epoch"]
        weights = []
        for strategy in (tf.distribute.get_strategy(), strategy_of(1, 2)):
            same_numbers.reset()
            with strategy.scope():
                model = workers_rows.dense()
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(make(), **fit)
            weights.append(model.get_weights())
        for actual, expected in zip(*weights[::-1]):
            same_numbers.assert_close(actual, expected)

    def test_moving_statistics_count_by_rows(self):
        means = []
        for strategy in (tf.distribute.get_strategy(), strategy_of(1, 2)):
            same_numbers.reset()
            with strategy.scope():
                layer = keras.layers.BatchNormalization(momentum=0.6)
                model = keras.Sequential([keras.Input((5,)), layer])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(X, X, batch_size=7, shuffle=False, verbose=0)
            means.append(np.array(layer.moving_mean))
        same_numbers.assert_close(*means[::-1])

    @parameterized.parameters(((1, 2), (2, 1, 1)), ((1, 2), None))
    @pytest.mark.crossing
    def test_goes_on_with_other_speeds(self, before, after):
        folder = self.create_tempdir().full_path

        def history(speeds, *callbacks):
            same_numbers.reset()
            strategy = tf.distribute.get_strategy()
            if speeds:
                strategy = strategy_of(*speeds)
            with strategy.scope():
                model = workers_rows.dense()
                model.compile("adam", "mse", metrics=["mae"])
            data = tfscale.data.pipeline(
                tfscale.data.arrays(X, Y), batch_size=4, seed=3
            )
            arguments = dict(epochs=3, verbose=0, callbacks=[*callbacks])
            return model.fit(data, **arguments).history, model.get_weights()

        def backup():
            return BackupAndRestore(folder, save_freq=1)

        expected = history(None)
        with self.assertRaises(Interrupted):
            history(before, backup(), Interrupt(6))
        logs, weights = history(after, backup(), Interrupt(None))
        same_numbers.assert_close(logs["mae"][-1], expected[0]["mae"][-1])
        for actual, value in zip(weights, expected[1]):
            same_numbers.assert_close(actual, value)

    @parameterized.parameters("1f1b", "interleaved", "auto")
    @pytest.mark.crossing(every=3)
    def test_of_stages(self, schedule):
        job = JOBS["deep"]
        found = same_numbers.on_mesh(
            job, 2, 2, schedule=schedule, speeds=[1, 2]
        )
        self.check(job, found)
        layers = [0, 0]
        plan = found.model.plan
        for device, stage in zip(plan.schedule.stage_devices, plan.stages):
            layers[device] += len(stage.calls)
        self.assertEqual(layers, [2, 4])


class MeasureTest(parameterized.TestCase):
    @mock.patch.dict(timing.WIDTHS, CPU=64)
    @mock.patch.object(timing, "SECONDS", 0.0)
    def test_has_a_speed_for_each_device(self):
        speeds = tfscale.device_mesh(data=2, speeds="measure").speeds
        self.assertLen(speeds, 2)
        self.assertEqual(min(speeds), 1.0)

    def test_each_device_is_timed(self):
        seconds = {"CPU:0": 0.31, "CPU:1": 0.1}
        with mock.patch.object(
            timing, "seconds_of_product", lambda names: seconds[names[0]]
        ):
            mesh = tfscale.device_mesh(
                data=2, devices=list(seconds), speeds="measure"
            )
        self.assertEqual(mesh.speeds, (1.0, 3.0))

    def test_noise_leaves_equal_devices_equal(self):
        self.assertEqual(speeds_by([1.0, 1.08, 0.95]), [1.0, 1.0, 1.2])


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters(
        (dict(data=2), [1], ValueError, "2 devices"),
        (dict(data=2), [], ValueError, "2 devices"),
        (dict(data=2), [1, 2, 3], ValueError, "2 devices"),
        (dict(data=2), [1, 0], ValueError, r"speeds=\[1, 0\]"),
        (dict(data=2), [1, -2], ValueError, r"speeds=\[1, -2\]"),
        (dict(data=2), [1, NAN], ValueError, r"speeds=\[1, nan\]"),
        (dict(data=2), [1, math.inf], ValueError, "inf"),
        (dict(data=2), [1, "2"], TypeError, "'2'"),
        (dict(data=2), [1, True], TypeError, "True"),
        (dict(data=2), [1, None], TypeError, "None"),
        (dict(data=2), [1, 2j], TypeError, "2j"),
        (dict(data=2), 2, TypeError, "speeds=2"),
        (dict(data=2), "fast", TypeError, "speeds='fast'"),
        (dict(data=2), {"CPU:0": 1, "CPU:1": 2}, TypeError, "CPU:0"),
        (dict(model=2), [1, 2], ValueError, "model=2"),
        (dict(data=2, pipeline=2), [1, 2, 3, 4], ValueError, "pipeline=2"),
        (dict(data=2, model=2), "measure", ValueError, "model=2"),
    )
    def test_is_refused(self, axes, speeds, error, received):
        with self.assertRaisesRegex(error, received):
            tfscale.device_mesh(**axes, speeds=speeds)
