"""A `train_step` of a user's runs on a part of a batch as on one device.

Its gradients, its logs and the numbers that it gives to means count by the
rows of the part: the loss that a step logged was too small by the number of
replicas, and gradients of a mean of its own were too large by it.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tfscale.callbacks import GradientAccumulation

RANDOM = np.random.RandomState(0)
# Of batches of 8, 8 and 3 rows replicas and microbatches get different numbers.
X = RANDOM.normal(size=(19, 16)).astype("float32")
Y = RANDOM.normal(size=(19, 8)).astype("float32")
WEIGHTS = RANDOM.uniform(0.0, 2.0, 19).astype("float32")


class Stepping(keras.Model):
    """The steps of Keras' guide; `loss_of` is the loss of a subclass."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mean_of_losses = keras.metrics.Mean(name="mean_of_losses")
        self.mean_of_rows = keras.metrics.Mean(name="mean_of_rows")
        self.error = keras.losses.MeanAbsoluteError()

    def loss_of(self, x, y, y_pred, sample_weight):
        raise NotImplementedError

    def logs(self, loss, y, y_pred):
        self.mean_of_losses.update_state(loss)
        self.mean_of_rows.update_state(keras.ops.max(abs(y - y_pred), -1))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        logs = {metric.name: metric.result() for metric in self.metrics}
        return {**logs, "value": loss, "twice": 2.0 * loss + 1.0}

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(x, y, y_pred, weights)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.logs(loss, y, y_pred)

    def test_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        return self.logs(self.loss_of(x, y, y_pred, weights), y, y_pred)


class Compiled(Stepping):
    def loss_of(self, x, y, y_pred, sample_weight):
        return self.compute_loss(x, y, y_pred, sample_weight)


class Mean(Stepping):
    def loss_of(self, x, y, y_pred, sample_weight):
        return keras.ops.mean(keras.ops.square(y - y_pred))


class HeldLoss(Stepping):
    def loss_of(self, x, y, y_pred, sample_weight):
        return 2.0 * self.error(y, y_pred)


class NewLoss(Stepping):
    def loss_of(self, x, y, y_pred, sample_weight):
        return keras.losses.Huber()(y, y_pred)


class Mixed(Stepping):
    """An autoencoder's: a compiled loss, and a mean added to it."""

    def loss_of(self, x, y, y_pred, sample_weight):
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return loss + keras.ops.mean(y_pred**2) / replicas


class Summed(Compiled):
    """Keeps a moving average of summed gradients in variables."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(x, y, y_pred, weights)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        gradients = tfscale.sum_gradients(gradients, variables)
        for average, gradient in zip(self.averages, gradients):
            average.assign(0.5 * average + gradient)
        averages = [tf.convert_to_tensor(a) for a in self.averages]
        self.optimizer.apply(averages, variables)
        return self.logs(loss, y, y_pred)


class OfKeras(Stepping):
    """Calls Keras' own steps."""

    def train_step(self, data):
        return keras.Model.train_step(self, data)

    def test_step(self, data):
        return keras.Model.test_step(self, data)


class Adds(keras.layers.Dense):
    """Adds a loss of Keras, which it has as an attribute."""

    huber = keras.losses.Huber()

    def call(self, x):
        y = super().call(x)
        self.add_loss(0.3 * self.huber(keras.ops.zeros_like(y), y))
        return y


def build(kind, adds=False):
    x = keras.Input((16,))
    make = Adds if adds else keras.layers.Dense
    h = make(256, "tanh", name="up")(x)
    model = kind(x, keras.layers.Dense(8, name="down")(h), name="mlp")
    if kind is Summed:
        model.averages = [
            model.add_weight(v.shape, "zeros", trainable=False)
            for v in model.trainable_variables
        ]
    return model


KINDS = {
    "compiled": (Compiled, {}, {}),
    "weighted": (Compiled, {}, dict(sample_weight=WEIGHTS)),
    "mean": (Mean, {}, {}),
    "held_loss": (HeldLoss, {}, {}),
    "new_loss": (NewLoss, {}, {}),
    "mixed": (Mixed, {}, {}),
    "of_keras": (OfKeras, {}, {}),
    "adds_a_loss": (Compiled, dict(adds=True), {}),
    "adds_a_loss_by_keras": (OfKeras, dict(adds=True), {}),
    "summed": (Summed, {}, {}),
}
LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}


def job(name, num_microbatches=None):
    kind, options, data = KINDS[name]
    callbacks = []
    if num_microbatches:
        callbacks.append(GradientAccumulation(num_microbatches))
    return same_numbers.Job(
        functools.partial(build, kind, **options),
        dict(x=X, y=Y, batch_size=8, validation_data=(X[:11], Y[:11]), **data),
        fit=dict(callbacks=callbacks),
    )


def on_replicas(name, data=2, **options):
    return same_numbers.on_zero(job(name), data, **options)


WAYS = {
    "data": functools.partial(on_replicas, zero_stage=0),
    "more_data": functools.partial(on_replicas, data=3, zero_stage=0),
    "zero_1": functools.partial(on_replicas, zero_stage=1),
    "zero_3": functools.partial(on_replicas, zero_stage=3),
    "ranks": lambda name: same_numbers.on_ranks(job(name), 2, 2, LAYOUTS),
    "accumulated": lambda name: same_numbers.plain(job(name, 3)),
    "accumulated_data": lambda name: same_numbers.on_zero(
        job(name, 2), 2, zero_stage=2
    ),
}
one_device = functools.cache(lambda name: same_numbers.on_one_device(job(name)))
# Of the step of two replicas they change their number, and the update.
OTHER_REPLICAS = ("more_data", "zero_1")
CASES = [
    (name, way)
    for name in KINDS
    for way in WAYS
    if name != "summed" or "accumulated" not in way
    if way not in OTHER_REPLICAS or name in ("compiled", "mixed", "summed")
]


class OwnStepsTest(parameterized.TestCase):
    @parameterized.parameters(*CASES)
    @pytest.mark.crossing(every=54)
    def test_has_the_numbers_of_one_device(self, name, way):
        same_numbers.assert_same(self, one_device(name), WAYS[way](name))

    def test_of_two_optimizers(self):
        """A GAN's, one of them made outside of the scope."""

        class Two(keras.Model):
            def train_step(self, data):
                x, y = data
                for optimizer, names in (
                    (self.first, ("up",)),
                    (self.optimizer, ("down",)),
                ):
                    layers = [self.get_layer(name) for name in names]
                    v = [w for x in layers for w in x.trainable_variables]
                    with tf.GradientTape() as tape:
                        loss = keras.ops.mean((self(x) - y) ** 2)
                    optimizer.apply(tape.gradient(loss, v), v)
                return {"loss": loss}

        def train(strategy=None):
            same_numbers.reset()
            outside = keras.optimizers.SGD(0.1)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = build(Two)
                model.first = outside
                model.compile(
                    keras.optimizers.Adam(0.01), run_eagerly=not strategy
                )
            fit = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
            return model.get_weights(), fit.history

        mesh = tfscale.device_mesh(data=2)
        expected, found = train(), train(tfscale.MeshStrategy(mesh))
        for a, b in zip(found[0], expected[0]):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            found[1]["loss"], expected[1]["loss"], rtol=1e-5
        )

    def test_the_number_of_replicas_is_that_of_one_device(self):
        seen = []

        class Asks(keras.Model):
            def train_step(self, data):
                replica = tf.distribute.get_replica_context()
                seen.append(replica.num_replicas_in_sync)
                return super().train_step(data)

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        with strategy.scope():
            model = build(Asks)
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        self.assertEqual(set(seen), {1})
        self.assertEqual(strategy.num_replicas_in_sync, 2)


if __name__ == "__main__":
    tf.test.main()
