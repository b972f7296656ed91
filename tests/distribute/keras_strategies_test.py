"""Keras' own strategies, and where docs/strategies.md says they are wrong."""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers

_RANDOM = np.random.RandomState(0)
X = _RANDOM.normal(size=(48, 6)).astype("float32")
X[::2] *= 4.0  # so that replicas have gradients of their own
Y = X[:, :3].argmax(1)
DEVICES = ["CPU:0", "CPU:1"]

STRATEGIES = {
    "OneDevice": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "Mirrored": lambda: tf.distribute.MirroredStrategy(
        DEVICES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    ),
    "CentralStorage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        DEVICES, "CPU:0"
    ),
}


@functools.cache
def train(strategy, rows=48, normalized=False, global_clipnorm=None):
    """What comes of an epoch of batches of 16."""

    def build():
        layers = [keras.Input((6,)), keras.layers.Dense(3, name="dense")]
        if normalized:
            layers.insert(1, keras.layers.BatchNormalization(name="norm"))
        return keras.Sequential(layers)

    job = same_numbers.Job(
        build,
        {"x": X[:rows], "y": Y[:rows], "batch_size": 16},
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=global_clipnorm),
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
    def test_one_device_is_one_device(self):
        expected = train("one", 45, global_clipnorm=0.1)
        actual = train("OneDevice", 45, global_clipnorm=0.1)
        self.assertLess(difference(actual, expected), 1e-6)
        for name, value in actual.logs.items():
            self.assertAllClose(value, expected.logs[name])

    @parameterized.parameters("Mirrored", "CentralStorage")
    def test_even_batches_are_right(self, strategy):
        self.assertLess(difference(train(strategy), train("one")), 1e-5)

    @parameterized.parameters(
        {"global_clipnorm": 0.1}, {"rows": 45}, {"normalized": True}
    )
    def test_mirrored_is_wrong(self, **options):
        found = difference(
            train("Mirrored", **options), train("one", **options)
        )
        self.assertGreater(found, 1e-2)

    def test_mirrored_has_the_metrics_of_one_device(self):
        expected = train("one").logs
        for name, value in train("Mirrored").logs.items():
            self.assertAllClose(value, expected[name])

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

    def test_central_storage_has_no_batch_normalization(self):
        with self.assertRaisesRegex(ValueError, "aggregation method"):
            train("CentralStorage", normalized=True)


if __name__ == "__main__":
    tf.test.main()
