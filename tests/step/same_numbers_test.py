"""Plain `fit` on two replicas has the numbers of one device.

Of 33 rows in batches of 16 the last one leaves a replica without any.
"""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers
from tfscale._internals import releases

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(33, 5)).astype("float32")
Y = RANDOM.normal(size=(33, 3)).astype("float32")
WEIGHTS = RANDOM.uniform(0.0, 2.0, 33).astype("float32")
# Short rows and long ones are not spread evenly over the replicas.
LENGTHS = np.where(np.arange(33) % 16 < 8, 1, 4)
TOKENS = np.where(
    np.arange(4) < LENGTHS[:, None], RANDOM.randint(1, 6, (33, 4)), 0
)
DATA = dict(x=X, y=Y, batch_size=16)
MSE = keras.losses.MeanSquaredError


def dense():
    x = keras.Input((5,))
    h = keras.layers.Dense(4, activation="tanh", name="a")(x)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def masked():
    x = keras.Input((4,), dtype="int32")
    h = keras.layers.Embedding(6, 4, mask_zero=True, name="a")(x)
    return keras.Model(x, keras.layers.Dense(3, name="b")(h))


def two_outputs():
    x = keras.Input((5,))
    left = keras.layers.Dense(3, name="left")(x)
    return keras.Model(x, [left, keras.layers.Dense(3, name="right")(x)])


@keras.saving.register_keras_serializable("tests")
class AddsLosses(keras.layers.Dense):
    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        compiled = super().compute_loss(x, y, y_pred, sample_weight, training)
        return compiled + keras.ops.mean(keras.ops.abs(y_pred))


def own_loss():
    x = keras.Input((5,))
    h = AddsLosses(4, kernel_regularizer="l2", name="a")(x)
    return OwnLoss(x, keras.layers.Dense(3, name="b")(h))


class AcrossRows(keras.Model):
    """Tells each row from those of all replicas (docs/numbers.md)."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        replica = tf.distribute.get_replica_context()
        rows = tf.shape(y)[0]
        first = replica.replica_id_in_sync_group * rows
        logits = y_pred @ tf.transpose(replica.all_gather(y, axis=0))
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                first + tf.range(rows), logits, from_logits=True
            )
        )


def across_rows():
    x = keras.Input((5,))
    return AcrossRows(x, keras.layers.Dense(3, name="a")(x))


def mean_of_all(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


JOBS = {
    "validated": same_numbers.Job(
        dense, DATA, fit=dict(validation_data=(X[:29], Y[:29]))
    ),
    "weighted": same_numbers.Job(
        dense,
        dict(DATA, sample_weight=WEIGHTS),
        loss=lambda: MSE(reduction="mean_with_sample_weight"),
    ),
    "masked": same_numbers.Job(
        masked,
        dict(x=TOKENS, y=TOKENS % 3, batch_size=16),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(True),
    ),
    # Of one output: Keras takes the first.
    "list": same_numbers.Job(dense, DATA, loss=lambda: ["mse", "mae"]),
    "several": same_numbers.Job(
        two_outputs,
        dict(x=X[:32], y=[Y[:32], Y[:32]], batch_size=16),
        loss=lambda: [MSE(reduction="sum"), "mae"],
        compile=lambda: dict(loss_weights=[0.3, 2.0]),
    ),
    "variable_weight": same_numbers.Job(
        two_outputs,
        dict(x=X[:32], y=[Y[:32], Y[:32]], batch_size=16),
        loss=lambda: ["mse", "mae"],
        compile=lambda: dict(
            loss_weights=[keras.Variable(0.3, trainable=False), 2.0]
        ),
    ),
    # The logs of these were NaN from a replica without rows.
    "several_scalars": same_numbers.Job(
        two_outputs,
        dict(x=X, y=[Y, Y], batch_size=16),
        loss=lambda: [mean_of_all, mean_of_all],
    ),
    "not_reduced": same_numbers.Job(
        dense, DATA, loss=lambda: MSE(reduction="none")
    ),
    "several_not_reduced": same_numbers.Job(
        two_outputs,
        dict(x=X, y=[Y, Y], batch_size=16),
        loss=lambda: [MSE(reduction="none"), MSE(reduction="none")],
    ),
    "own": same_numbers.Job(own_loss, DATA),
    "across_rows": same_numbers.Job(
        across_rows,
        dict(x=X[:32], y=Y[:32], batch_size=16),
        loss=lambda: None,
    ),
    "scalar": same_numbers.Job(dense, DATA, loss=lambda: mean_of_all),
}


class PlainFitTest(parameterized.TestCase):
    @parameterized.parameters(*JOBS)
    @pytest.mark.crossing(every=6)
    def test_two_replicas(self, name):
        expected = same_numbers.on_one_device(JOBS[name])
        if name == "several_scalars" and not releases.IS_3_15:
            # These means are those of Keras, which knows the rows of batches.
            logs = same_numbers.plain(JOBS[name]).logs
            expected = dataclasses.replace(expected, logs=logs)
        with warned(self, name):
            actual = same_numbers.on_ranks(JOBS[name], 1, 2, layouts={})
        same_numbers.assert_same(self, expected, actual)
        self.assertIs(actual.model.__class__, expected.model.__class__)


class PipelineTest(parameterized.TestCase):
    """Once a scalar was multiplied by the replicas, and a sum was logged."""

    @parameterized.parameters("scalar", "not_reduced", "variable_weight")
    @pytest.mark.crossing(every=6)
    def test_two_replicas(self, name):
        job = JOBS[name]
        if name != "variable_weight":
            data = dict(x=X[:32], y=Y[:32], batch_size=16)
            job = dataclasses.replace(job, data=data)
        expected = same_numbers.on_one_device(job)
        with warned(self, name):
            actual = same_numbers.on_mesh(job, 1, 2, 2)
        same_numbers.assert_same(self, expected, actual)

    def test_reduced_and_not_is_refused(self):
        losses = [MSE(reduction="none"), "mae"]
        job = dataclasses.replace(JOBS["several"], loss=lambda: losses)
        with self.assertRaisesRegex(ValueError, "Received: reduction='none'"):
            same_numbers.on_mesh(job, 1, 2)


def warned(test, name):
    if "scalar" not in name:
        return contextlib.nullcontext()
    return test.assertWarnsRegex(
        UserWarning, "the loss 'mean_of_all', which returns a scalar"
    )
