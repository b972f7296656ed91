"""A model that mixes the rows of a batch is warned of, in parts of a batch.

One that subtracted the mean over the batch had other numbers on replicas and in
microbatches without a word.
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
from tfscale.step.checks import across_rows

X = np.random.default_rng(0).normal(size=(16, 4, 6)).astype("float32")


def by_groups(x):
    """Statistics of a minibatch, as of ProGAN."""
    groups = ops.reshape(x, (2, -1, *x.shape[1:]))
    spread = ops.std(groups, axis=0)
    return x + ops.mean(spread)


def attention_between_rows(x):
    flat = ops.reshape(x, (-1, 24))
    weights = ops.softmax(ops.matmul(flat, ops.transpose(flat)))
    return ops.reshape(ops.matmul(weights, flat), (-1, 4, 6))


MIXING = (
    lambda x: x - ops.mean(x, axis=0),
    lambda x: x / ops.max(ops.abs(x)),
    lambda x: x + ops.flip(x, 0),
    lambda x: x + ops.cumsum(x, axis=0),
    lambda x: x + tf.random.shuffle(x),
    lambda x: ops.softmax(ops.transpose(x, (1, 2, 0))),
    lambda x: ops.sum(ops.abs(x[:, None] - x[None]), axis=1),
    lambda x: x + ops.mean(ops.reshape(x, (-1, 6)), axis=0),
    lambda x: ops.matmul(x, ops.einsum("bsd,bse->de", x, x)),
    by_groups,
    attention_between_rows,
)
APART = (
    lambda x: x - ops.mean(x, axis=1, keepdims=True),
    lambda x: ops.softmax(ops.transpose(x, (1, 0, 2))),
    lambda x: x * ops.mean(ops.ones_like(x)),
    lambda x: x / ops.cast(ops.shape(x)[0], x.dtype),
    lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
    lambda x: ops.reshape(x, (-1, 6)) @ ops.ones((6, 6)),
    lambda x: ops.mean(ops.reshape(x, (1, -1, 6)), axis=0),
    lambda x: ops.concatenate([x[:, ::2], x[:, 1::2]], axis=1),
    lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    lambda x: ops.sum(x[:, :, None] * x[:, None], axis=1),
    lambda x: ops.conv(x, ops.ones((2, 6, 6)), padding="same"),
    lambda x: tf.vectorized_map(lambda row: row - ops.mean(row), x),
)


class Centred(keras.layers.Layer):
    def call(self, x):
        return x - self.mean(x)

    def mean(self, x):
        return ops.mean(x, axis=0)


class CentredByAll(Centred):
    """As one device, on replicas that have as many rows each."""

    def mean(self, x):
        replica = tf.distribute.get_replica_context()
        mean = super().mean(x)
        return mean if replica is None else replica.all_reduce("MEAN", mean)


class OwnBatchNorm(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training, mask)


def of_keras(synchronized):
    layers = keras.layers
    inputs = keras.Input((4, 6))
    x = layers.Masking()(inputs)
    x = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
    x = layers.BatchNormalization()(OwnBatchNorm()(x))
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    x = layers.GroupNormalization(2)(layers.LSTM(6, return_sequences=True)(x))
    x = layers.UnitNormalization()(layers.LayerNormalization()(x))
    x = layers.Dense(6)(layers.Dropout(0.1)(x))
    x = layers.GaussianDropout(0.1)(layers.Conv1D(6, 2, padding="same")(x))
    return keras.Model(inputs, x)


def made_of(layer):
    return keras.Sequential([keras.Input((4, 6)), layer, keras.layers.Dense(6)])


def functional():
    inputs = keras.Input((4, 6))
    x = keras.layers.Dense(6)(inputs)
    return keras.Model(inputs, x - ops.mean(x, axis=0, keepdims=True))


def train(model, callbacks):
    for _ in range(2):
        model.fit(X, X, batch_size=8, verbose=0, callbacks=callbacks)


def predict(model, callbacks):
    for _ in range(2):
        model.predict(X, batch_size=8, verbose=0)


def evaluate(model, callbacks):
    for _ in range(2):
        model.evaluate(X, X, batch_size=8, verbose=0)


def everything(model, callbacks):
    for use in (predict, evaluate, train, predict):
        use(model, callbacks)


def fit(
    make_model,
    accumulated=None,
    wrap=lambda model: model,
    use=train,
    **axes,
):
    """Uses a model, and returns what is warned of."""
    same_numbers.reset()
    callbacks = []
    if accumulated:
        callbacks = [tfscale.callbacks.GradientAccumulation(accumulated)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with tfscale.MeshStrategy(tfscale.device_mesh(**axes)).scope():
            model = wrap(make_model())
            model.compile("sgd", "mse")
        use(model, callbacks)
    said = [str(w.message) for w in said if w.category is UserWarning]
    return [text for text in said if "treat each row" in text]


def in_stages(model):
    return tfscale.PipelineModel(model, num_microbatches=2)


class AcrossRowsTest(parameterized.TestCase):
    @parameterized.parameters(
        *((True, function) for function in MIXING),
        *((False, function) for function in APART),
    )
    def test_what_mixes_rows_is_found(self, expected, function):
        for rows in (None, 8):
            with tf.Graph().as_default():
                x = tf.compat.v1.placeholder("float32", (rows, 4, 6))
                found = across_rows.mixing_operations([x], [function(x)])
                self.assertEqual(bool(found), expected, found)

    @parameterized.parameters(
        dict(data=2),
        dict(accumulated=4),
        dict(data=2, accumulated=2),
        dict(pipeline=2, wrap=in_stages),
    )
    @pytest.mark.crossing(every=4)
    def test_it_is_warned_of_once_in_parts_of_a_batch(self, **options):
        (said,) = fit(lambda: made_of(Centred()), **options)
        self.assertRegex(said, r"Mean '.*centred.*' \(line \d+ of .*_test.py\)")
        (said,) = fit(functional, **options)
        self.assertRegex(said, "Received: Mean '")

    @parameterized.product(
        use=(predict, evaluate, everything),
        options=(dict(data=2), dict(pipeline=2, wrap=in_stages)),
    )
    @pytest.mark.crossing(every=3)
    def test_it_is_warned_of_where_nothing_is_trained(self, use, options):
        # `predict` had other numbers without a word.
        (said,) = fit(lambda: made_of(Centred()), use=use, **options)
        self.assertRegex(said, "Received: Mean '")
        if use is predict:
            apart = keras.layers.BatchNormalization()
            self.assertEqual(
                fit(lambda: made_of(apart), use=use, **options), []
            )

    def test_what_has_all_rows_is_not_warned_of(self):
        self.assertEqual(fit(lambda: made_of(Centred())), [])
        for use in (train, predict):
            said = fit(lambda: made_of(CentredByAll()), use=use, data=2)
            self.assertEqual(said, [])

    @parameterized.parameters(
        dict(data=2), dict(accumulated=4), dict(pipeline=2, wrap=in_stages)
    )
    @pytest.mark.crossing(every=3)
    def test_layers_of_keras_are_not_warned_of(self, **options):
        synchronized = "data" in options
        self.assertEqual(fit(lambda: of_keras(synchronized), **options), [])


if __name__ == "__main__":
    tf.test.main()
