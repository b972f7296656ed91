"""Means of single numbers, and metrics of replicas without rows.

The tracker of a loss, or an error of outputs with one dim, was updated once by
each replica and each microbatch: a mean of means, and NaN from a replica
without rows.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tfscale
from tests import same_numbers
from tfscale.callbacks import GradientAccumulation

RANDOM = np.random.RandomState(0)
# Batches of 8, 8 and 1 rows: of replicas and of microbatches some have none.
X = RANDOM.normal(size=(17, 4)).astype("float32")
Y = RANDOM.normal(size=(17,)).astype("float32")


class MeanTimesRows(keras.metrics.Metric):
    """Sums up a mean, which is NaN without rows."""

    def __init__(self):
        super().__init__(name="times_rows")
        self.sum = self.add_variable((), "zeros")
        self.rows = self.add_variable((), "zeros")

    def update_state(self, y, p, sample_weight=None):
        rows = ops.cast(ops.shape(y)[0], "float32")
        self.sum.assign_add(ops.mean(ops.abs(y - p)) * rows)
        self.rows.assign_add(rows)

    def result(self):
        return self.sum / self.rows


def two_errors(y, p):
    """A number for each of two classes, of all rows."""
    return ops.stack([ops.mean(ops.abs(y - p)), ops.mean(ops.square(y - p))])


def absolute_by_shape(y, p):
    """A number for each row, of a shape that the data had when traced."""
    rows = tf.shape(y)[0] if y.shape[0] is None else int(y.shape[0])
    return tf.reshape(ops.abs(y - p), [rows])


def first_two(y, p):
    """A number for each of two classes, from the numbers of some columns."""
    errors = ops.abs(y - ops.concatenate([p, 2 * p], axis=1))
    return ops.sum(errors, axis=0) / ops.cast(ops.shape(y)[0], p.dtype)


def error_of_dicts(y, p):
    return ops.abs(y["of"] - p["of"])


class Tracking(keras.Model):
    """Writes means of its own, as guides of Keras do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.square = keras.metrics.Mean(name="square")
        # Refused as it has no shape.
        self.dicts = keras.metrics.MeanMetricWrapper(error_of_dicts, "dicts")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        self.square.update_state(ops.mean(ops.square(y_pred)))
        self.dicts.update_state({"of": y}, {"of": y_pred})
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def history(strategy=None, microbatches=1):
    same_numbers.reset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        x = keras.Input((4,))
        y = ops.squeeze(keras.layers.Dense(1)(x), -1)
        model = Tracking(x, y)
        model.compile(
            "sgd",
            lambda y, p: ops.square(y - p),
            metrics=[
                "mae",
                keras.metrics.MeanSquaredError(),
                two_errors,
                MeanTimesRows(),
            ],
            run_eagerly=not strategy and microbatches == 1,
        )
    return model.fit(
        *(X, Y),
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[GradientAccumulation(microbatches)],
    ).history


class MetricTest(parameterized.TestCase):
    @parameterized.parameters((2, 1), (3, 1), (None, 3), (3, 2))
    @pytest.mark.crossing(every=4)
    def test_single_numbers_count_by_rows(self, data, microbatches):
        expected = history()
        strategy = None
        if data:
            strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=data))
        found = history(strategy, microbatches)
        self.assertEqual(set(found), set(expected))
        for name, value in expected.items():
            same_numbers.assert_close(found[name], value, name)

    @parameterized.parameters("array", "dataset")
    def test_as_many_classes_as_rows(self, kind):
        """Of three rows a replica has two, the other one."""

        def fit(strategy=None):
            same_numbers.reset()
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = keras.Sequential(
                    [keras.Input((4,)), keras.layers.Dense(1)]
                )
                metrics = [two_errors, absolute_by_shape, first_two]
                model.compile("sgd", "mse", metrics=metrics)
            x, y = X[:6], Y[:6, None]
            data = dict(x=x, y=y, batch_size=3)
            if kind == "dataset":
                dataset = tf.data.Dataset.from_tensor_slices((x, y))
                data = dict(x=dataset.batch(3, drop_remainder=True))
            return model.fit(**data, shuffle=False, verbose=0).history

        mesh = tfscale.device_mesh(data=2)
        found = fit(tfscale.MeshStrategy(mesh))
        for name, value in fit().items():
            same_numbers.assert_close(found[name], value, name)


if __name__ == "__main__":
    tf.test.main()
