"""A `compute_loss` that is no mean over rows is warned of, in parts of a batch.

Negatives in the batch, as of CLIP, were compared within a replica or microbatch
without a word, where a pipeline warned.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops

import tfscale
from tests import same_numbers

X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")


class Contrastive(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = ops.matmul(y_pred, ops.transpose(y_pred[:, ::-1]))
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                ops.arange(ops.shape(logits)[0]), logits, from_logits=True
            )
        )


class Sum(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.sum(ops.square(y_pred))


class MeanBeside(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.mean(ops.square(y_pred)) + 0.1 * ops.mean(x)


def fit(kind, data, accumulated=None):
    """Trains, and returns what is warned of."""
    same_numbers.reset()
    callbacks = []
    if accumulated:
        callbacks = [tfscale.callbacks.GradientAccumulation(accumulated)]
    with tfscale.MeshStrategy(tfscale.device_mesh(data=data)).scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, kernel_regularizer="l2")(inputs)
        model = kind(inputs, keras.layers.Dense(4)(hidden), name="towers")
        model.compile("sgd", None if kind is Contrastive else "mse")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(
            *(X, X[:, :4]),
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=callbacks,
        )
    return [str(w.message) for w in said if w.category is UserWarning]


class LossTrialTest(parameterized.TestCase):
    @parameterized.parameters(
        (Contrastive, 2), (Sum, 2), (Contrastive, 1, 4), (Sum, 2, 2)
    )
    @pytest.mark.crossing(every=4)
    def test_what_is_no_mean_is_warned_of_once(self, *arguments):
        (said,) = fit(*arguments)
        self.assertRegex(said, "Received: that of 'towers', which on a trial")

    @parameterized.parameters(
        (Contrastive, 1), (Sum, 1), (MeanBeside, 2), (MeanBeside, 1, 4)
    )
    @pytest.mark.crossing(every=4)
    def test_what_is_one_and_what_has_the_batch_is_not(self, *arguments):
        self.assertEqual(fit(*arguments), [])


if __name__ == "__main__":
    tf.test.main()
