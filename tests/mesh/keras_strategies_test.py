"""Keras' own strategies, and where docs/strategies.md says they are wrong.

Nothing of tfscale changes that, so most of it is for `--exhaustive`.
"""

import functools
import json
import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import forked_cluster
from tests import same_numbers
from tests import strategies

_RANDOM = np.random.RandomState(0)
X = _RANDOM.normal(size=(48, 6)).astype("float32")
X[::2] *= 4.0  # so that replicas have gradients of their own
Y = X[:, :3].argmax(1)
TOKENS = _RANDOM.randint(0, 4, (48, 5)).astype("int32")
DEVICES = ["CPU:0", "CPU:1"]

STRATEGIES = {
    "OneDevice": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "Mirrored": strategies.mirrored,
    "CentralStorage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        DEVICES, "CPU:0"
    ),
}


@functools.cache
def train(strategy, rows=48, normalized=False, embedded=False, **options):
    """What comes of an epoch of batches of 16."""

    def build():
        layers = [keras.Input((6,)), keras.layers.Dense(3, name="dense")]
        if normalized:
            layers.insert(1, keras.layers.BatchNormalization(name="norm"))
        if embedded:
            layers[:1] = [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(4, 3, name="tokens"),
                keras.layers.Flatten(),
            ]
        return keras.Sequential(layers)

    kind = keras.optimizers.Adam if embedded else keras.optimizers.SGD
    x = TOKENS if embedded else X
    job = same_numbers.Job(
        build,
        {"x": x[:rows], "y": Y[:rows], "batch_size": 16},
        lambda: kind(0.1, **options),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: {"metrics": ["accuracy"]},
    )
    if strategy == "one":
        return same_numbers.on_one_device(job)
    return same_numbers.plain(job, STRATEGIES[strategy]())


def difference(actual, expected):
    """Of weights, relative to the largest entry of each."""
    return max(
        np.abs(actual.variables[path] - value).max() / np.abs(value).max()
        for path, value in expected.variables.items()
    )


class KerasStrategiesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters({"global_clipnorm": 0.1}, {"normalized": True})
    @pytest.mark.crossing
    def test_one_device_is_one_device(self, **options):
        expected = train("one", 45, **options)
        actual = train("OneDevice", 45, **options)
        self.assertLess(difference(actual, expected), 1e-6)
        for name, value in actual.logs.items():
            self.assertAllClose(value, expected.logs[name])

    @parameterized.parameters("Mirrored", "CentralStorage")
    @pytest.mark.crossing
    def test_even_batches_are_right(self, strategy):
        self.assertLess(difference(train(strategy), train("one")), 1e-5)

    @parameterized.product(
        strategy=["Mirrored", "CentralStorage"],
        options=[{"global_clipnorm": 0.1}, {"clipnorm": 0.1}, {"rows": 45}],
    )
    @pytest.mark.crossing
    def test_clipping_and_uneven_batches_are_wrong(self, strategy, options):
        found = difference(train(strategy, **options), train("one", **options))
        self.assertGreater(found, 1e-2)

    @pytest.mark.crossing
    def test_mirrored_normalizes_each_replicas_part(self):
        found = difference(
            train("Mirrored", normalized=True), train("one", normalized=True)
        )
        self.assertGreater(found, 1e-2)

    @parameterized.parameters(*STRATEGIES)
    @pytest.mark.crossing
    def test_rows_of_embeddings_are_wrong(self, strategy):
        # Of one device the harness sums up the rows, which Keras does not.
        found = difference(
            train(strategy, embedded=True), train("one", embedded=True)
        )
        self.assertGreater(found, 1e-3)

    @pytest.mark.crossing
    def test_mirrored_does_not_accumulate_gradients(self):
        with self.assertRaises(RuntimeError):
            train("Mirrored", gradient_accumulation_steps=2)

    @pytest.mark.crossing
    def test_mirrored_has_the_metrics_of_one_device(self):
        expected = train("one").logs
        for name, value in train("Mirrored").logs.items():
            self.assertAllClose(value, expected[name])

    @pytest.mark.crossing
    def test_central_storage_counts_rows_twice(self):
        expected = train("one")
        actual = train("CentralStorage")
        self.assertNotAlmostEqual(
            actual.logs["loss"][0], expected.logs["loss"][0], places=2
        )
        count = [
            int(v.numpy())
            for metric in actual.model.metrics
            for v in metric.variables
            if v.name == "count"
        ]
        self.assertEqual(set(count), {112})  # of 48

    @pytest.mark.crossing
    def test_central_storage_has_no_batch_normalization(self):
        with self.assertRaisesRegex(ValueError, "aggregation method"):
            train("CentralStorage", normalized=True)

    @pytest.mark.crossing
    def test_those_for_several_processes_fail_before_the_first_step(self):
        with tempfile.TemporaryDirectory() as folder:
            forked_cluster.run(
                "tests.mesh.keras_cluster",
                {"chief": 1, "worker": 2},
                folder,
            )
            for name, message in (
                ("chief0", "ClusterCoordinator.create_per_worker_dataset"),
                ("worker0", "unsupported type .*PerReplica"),
                ("worker1", "unsupported type .*PerReplica"),
            ):
                with (
                    self.subTest(name),
                    open(os.path.join(folder, f"{name}.json")) as file,
                ):
                    found, steps = json.load(file)
                    self.assertRegex(found, f"(?s)^ValueError: .*{message}")
                    self.assertEqual(steps, 0)


if __name__ == "__main__":
    tf.test.main()
