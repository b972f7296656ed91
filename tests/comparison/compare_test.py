"""`tfscale.compare` finds what differs, and nothing where nothing does."""

import functools
import itertools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from keras import layers
from keras import ops

import tfscale
from tfscale.comparison import memory
from tfscale.comparison import training

RANDOM = np.random.RandomState(0)
ROWS, LENGTH = 8, 6
X = RANDOM.normal(size=(3 * ROWS, 8)).astype("float32")
Y = RANDOM.normal(size=(3 * ROWS, 4)).astype("float32")
IMAGES = RANDOM.normal(size=(3 * ROWS, 8, 8, 3)).astype("float32")
CLASSES = RANDOM.randint(0, 5, 3 * ROWS)
TOKENS = RANDOM.randint(0, 11, (3 * ROWS, LENGTH))
NOISE = RANDOM.normal(size=(3 * ROWS, 2)).astype("float32")
SGD = keras.optimizers.SGD


def batches(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(ROWS)


def two_replicas(**options):
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2), **options)


def mlp(*middle, kind=keras.Model, optimizer=None, **compiled):
    x = keras.Input((8,))
    h = layers.Dense(16, "tanh", name="a")(x)
    for layer in middle:
        h = layer(h)
    model = kind(x, layers.Dense(4, name="b")(h))
    model.compile(optimizer or SGD(0.05, 0.9), **{"loss": "mse", **compiled})
    return model


class MaxError(keras.metrics.Metric):
    def __init__(self, name="max_error"):
        super().__init__(name=name)
        self.error = self.add_variable((), "zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        error = ops.max(ops.abs(y - y_pred))
        self.error.assign(ops.maximum(self.error, error))

    def result(self):
        return self.error


def contrastive(y, y_pred):
    logits = y_pred @ ops.transpose(y)
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(y)[0]), logits, from_logits=True
    )


class Clipped(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


class Normed(keras.optimizers.Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        norm = ops.norm(ops.reshape(gradient, [-1])) + 1e-6
        variable.assign(variable - learning_rate * gradient / norm)


class Centered(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


# A model, and what is said to differ: phase, kind, end of the name, the row.
DIFFERING = {
    "batch_norm": (
        lambda: mlp(layers.BatchNormalization(name="norm")),
        ("fit", "weight", "a/kernel", "BatchNormalization.*norm"),
    ),
    "maximum": (
        lambda: mlp(metrics=[MaxError()]),
        ("evaluate", "log", "max_error", "metrics that are not sums"),
    ),
    "contrastive": (
        lambda: mlp(loss=contrastive),
        ("evaluate", "log", "loss", "losses across rows.*contrastive"),
    ),
    "clipped_by_hand": (
        lambda: mlp(kind=Clipped),
        ("fit", "weight", "a/kernel", "Gradients changed by hand"),
    ),
    "mean_of_the_batch": (
        lambda: mlp(Centered(name="centered")),
        ("predict", "output", "output", "layers across rows.*centered"),
    ),
}


def gpt(num_blocks=1, optimizer=None):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(11, 16, name="tokens")(tokens)
    for i in range(num_blocks):
        y = layers.LayerNormalization(name=f"norm{i}")(x)
        y = layers.MultiHeadAttention(2, 8, dropout=0.1, name=f"attention{i}")(
            y, y, use_causal_mask=True
        )
        x = x + layers.Dropout(0.1, name=f"dropout{i}")(y)
        x = x + layers.Dense(16, "gelu", name=f"mlp{i}")(x)
    model = keras.Model(tokens, layers.Dense(11, name="logits")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or SGD(0.05, 0.9)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def resnet(all_filters=(4,)):
    def norm(x):
        return layers.BatchNormalization(synchronized=True)(x)

    x = inputs = keras.Input((8, 8, 3))
    for filters in all_filters:
        y = norm(layers.Conv2D(filters, 3, 2, "same")(x))
        y = keras.activations.relu(y)
        y = norm(layers.Conv2D(filters, 3, padding="same")(y))
        x = keras.activations.relu(y + layers.Conv2D(filters, 1, 2)(x))
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(5)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(SGD(0.05, 0.9), loss, metrics=["accuracy"])
    return model


class Gan(keras.Model):
    """Two networks and optimizers; the noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(8)]
        )
        self.critic = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.of_critic = SGD(0.05, 0.9)
        self.of_generator = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        noise, real = data
        made = self.generator(noise)
        both = ops.concatenate([real, made])
        labels = ops.concatenate([ops.ones_like(real), ops.zeros_like(made)])
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels[:, :1], self.critic(both))
        weights = self.critic.trainable_variables
        self.of_critic.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            fooled = self.critic(self.generator(noise))
            loss = self.loss_fn(ops.ones_like(fooled), fooled)
        weights = self.generator.trainable_variables
        self.of_generator.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def gan():
    model = Gan()
    model.compile()
    return model


class Sampled(layers.Layer):
    """Adds its divergence; the noise comes with the data."""

    def call(self, mean, log_variance, noise):
        square = ops.square(mean) + ops.exp(log_variance)
        divergence = ops.sum(square - 1.0 - log_variance, axis=-1) / 2.0
        self.add_loss(ops.mean(divergence))
        return mean + ops.exp(log_variance / 2.0) * noise


def vae():
    inputs = keras.Input((8,), name="x"), keras.Input((2,), name="noise")
    hidden = layers.Dense(8, "tanh", name="encoder")(inputs[0])
    mean = layers.Dense(2, name="mean")(hidden)
    variance = layers.Dense(2, name="log_variance")(hidden)
    z = Sampled(name="sampled")(mean, variance, inputs[1])
    z = layers.Dense(8, "tanh", name="decoder")(z)
    model = keras.Model(inputs, layers.Dense(8, name="mean_of_x")(z))
    model.compile(SGD(0.05, 0.9), "mse")
    return model


# A model, its data, and the arguments of the comparison.
EQUAL = {
    "gpt": (gpt, lambda: batches(TOKENS, TOKENS), dict(dtype="float64")),
    "resnet": (resnet, lambda: batches(IMAGES, CLASSES), dict(dtype="float64")),
    "gan": (gan, lambda: batches(NOISE, X), dict(dtype="float64")),
    "vae": (
        vae,
        lambda: tf.data.Dataset.from_tensor_slices(((X, NOISE), X)).batch(ROWS),
        dict(dtype="float64"),
    ),
}
DEEPER = {
    "gpt": (lambda: gpt(2, "adam"), lambda: batches(TOKENS, TOKENS), {}),
    "resnet": (
        lambda: resnet((4, 8)),
        lambda: batches(IMAGES, CLASSES),
        dict(dtype="float64"),
    ),
}


class FindsTest(parameterized.TestCase):
    @parameterized.parameters(*DIFFERING)
    def test_what_differs_on_two_replicas(self, name):
        build, (phase, kind, end, reason) = DIFFERING[name]
        report = tfscale.compare(build, batches(X, Y), two_replicas())
        found = [
            d
            for d in report.differences()
            if (d.phase, d.kind) == (phase, kind) and d.name.endswith(end)
        ]
        self.assertLen(found, 1, report.table())
        self.assertRegex(found[0].reason, reason)

    def test_a_layer_that_counts_calls_is_named_in_microbatches(self):
        def build():
            return mlp(layers.SpectralNormalization(layers.Dense(8), name="s"))

        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        report = tfscale.compare(
            build,
            batches(X, Y),
            strategy,
            wrap=lambda model: tfscale.PipelineModel(model, 2),
            dtype="float64",
        )
        found = report.differences()
        self.assertNotEmpty(found)
        for each in found:
            self.assertRegex(each.reason, "counters, averages over calls.*: s")

    def test_an_optimizer_with_a_norm_is_refused_on_shards(self):
        # By its exact trial, before the first step; nothing is trained.
        with self.assertRaisesRegex(ValueError, "Normed"):
            tfscale.compare(
                lambda: mlp(optimizer=Normed(0.1)),
                batches(X, Y),
                two_replicas(zero_stage=1),
            )

    @parameterized.parameters(*EQUAL)
    @pytest.mark.crossing(every=4)
    def test_nothing_where_nothing_differs(self, name):
        build, data, options = EQUAL[name]
        report = self.check_is_equal(build, data, options)
        self.assertLen(report.skipped, 2 if name == "gan" else 0)

    @parameterized.named_parameters((name, *DEEPER[name]) for name in DEEPER)
    @pytest.mark.crossing
    def test_nothing_in_deeper_models(self, build, data, options):
        self.check_is_equal(build, data, options)

    def check_is_equal(self, build, data, options):
        report = tfscale.compare(build, data(), two_replicas(), **options)
        report.check()
        kinds = {key.kind for key in report.distances}
        self.assertContainsSubset({"weight", "slot"}, kinds)
        self.assertEmpty(report.drawing)
        return report

    def test_a_wrapped_model_stays_compiled_and_sees_its_microbatches(self):
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        build = DIFFERING["batch_norm"][0]
        for num_microbatches in (1, 2):
            report = tfscale.compare(
                build,
                batches(X, Y),
                strategy,
                wrap=functools.partial(
                    tfscale.PipelineModel, num_microbatches=num_microbatches
                ),
            )
            found = report.differences()
            self.assertEqual(bool(found), num_microbatches == 2)
        with self.assertRaisesRegex(ValueError, "norm"):
            report.check()
        # The first step differs, and what is before the steps does not.
        steps = {d.name: d.step for d in found if d.kind == "weight"}
        self.assertEqual(steps["a/kernel"], 1)
        self.assertEqual({d.phase for d in found}, {"fit"})

    def test_a_layer_that_draws_on_is_named(self):
        report = tfscale.compare(
            lambda: mlp(Noisy(name="noisy"), layers.GaussianNoise(0.5)),
            batches(X, Y),
            two_replicas(),
            steps=1,
        )
        self.assertEqual(report.drawing, ["noisy"])
        self.assertIn("noisy", report.table())


class Noisy(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if not training:
            return x
        return x + keras.random.normal(ops.shape(x), seed=self.seed_generator)


class BadInputTest(parameterized.TestCase):
    def refused(self, kind, message, build=mlp, data=None, **options):
        data = batches(X, Y) if data is None else data
        with (
            mock.patch.object(training.Training, "fit") as fit,
            self.assertRaisesRegex(kind, message),
        ):
            tfscale.compare(build, data, two_replicas(), **options)
        fit.assert_not_called()

    def test_a_model_that_is_not_compiled(self):
        def build():
            x = keras.Input((8,))
            return keras.Model(x, layers.Dense(4)(x))

        self.refused(ValueError, "compiled.*compile` in `build_model", build)

    def test_another_input_than_the_dataset_has(self):
        data = batches(IMAGES, Y)
        self.refused(ValueError, "what `dataset` has.*evaluate", data=data)

    def test_a_step_that_needs_another_input_than_the_dataset_has(self):
        with self.assertRaisesRegex(ValueError, "what `dataset` has.*`fit`"):
            tfscale.compare(
                lambda: mlp(kind=Clipped), batches(IMAGES, Y), two_replicas()
            )

    def test_a_model_that_is_another_one_each_time(self):
        numbers = itertools.count(3)

        def weights():
            model = mlp()
            model.set_weights([w + next(numbers) for w in model.get_weights()])
            return model

        def shapes():
            x = keras.Input((8,))
            hidden = layers.Dense(next(numbers), name="a")(x)
            model = keras.Model(x, layers.Dense(4, name="b")(hidden))
            model.compile("sgd", "mse")
            return model

        self.refused(ValueError, "the same model.*a/kernel", weights)
        self.refused(ValueError, "the same model.*a/kernel", shapes)

    def test_a_dataset_that_ends_before(self):
        self.refused(ValueError, "3 batches and steps=4", steps=4)
        generator = (batch for batch in batches(X, Y))
        self.refused(ValueError, "3 batches", data=generator, steps=4)

    def test_a_model_that_does_not_fit(self):
        with mock.patch.object(memory, "free_bytes", lambda: 1000):
            self.refused(ValueError, "must fit.*1000.00 B", steps=1)

    def test_other_arguments(self):
        self.refused(TypeError, "build_model", mlp())
        self.refused(ValueError, "steps.*0", steps=0)
        self.refused(TypeError, "wrap.*None", wrap=lambda model: None)
        strategy = two_replicas()
        with strategy.scope():
            self.refused(ValueError, "outside of a strategy's scope")


if __name__ == "__main__":
    absltest.main()
