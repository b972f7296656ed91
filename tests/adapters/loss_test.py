"""A Keras loss that a layer adds is that of all rows, as on one device.

Each replica divided it by their number, and it was weighed by rows after that.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import same_numbers
from tfscale.callbacks import GradientAccumulation

RANDOM = np.random.RandomState(0)


class Reconstructed(keras.layers.Layer):
    """Adds a loss, as the endpoint in a guide of Keras does."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.huber = keras.losses.Huber()

    def call(self, x):
        found = self.dense(x)
        weights = keras.ops.abs(x[:, 0])
        self.add_loss(0.3 * self.huber(x, found, sample_weight=weights))
        return found


def model():
    inputs = keras.Input((4,))
    x = Reconstructed()(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


# Batches of 5, 5 and 3 rows, which two replicas divide unevenly.
JOB = same_numbers.Job(
    model,
    dict(
        x=RANDOM.normal(size=(13, 4)).astype("float32"),
        y=RANDOM.normal(size=(13, 2)).astype("float32"),
        batch_size=5,
    ),
)
one_device = functools.cache(lambda: same_numbers.on_one_device(JOB))


class AddedLossTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        lambda job: same_numbers.on_zero(job, 2, zero_stage=0),
        lambda job: same_numbers.on_mesh(job, 2, 2, 2),
        lambda job: same_numbers.on_zero(accumulated(job), 2, zero_stage=0),
    )
    @pytest.mark.crossing(every=3)
    def test_has_the_numbers_of_one_device(self, train):
        same_numbers.assert_same(self, one_device(), train(JOB))


def accumulated(job):
    callbacks = [GradientAccumulation(2)]
    return dataclasses.replace(job, fit=dict(callbacks=callbacks))


if __name__ == "__main__":
    tf.test.main()
