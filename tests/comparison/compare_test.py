"""`tfscale.compare` finds what differs, and nothing where nothing does."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from keras import layers
from keras import ops

import tfscale

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
        print(report.table())
        self.assertLen(found, 1, report.table())
        self.assertRegex(found[0].reason, reason)


if __name__ == "__main__":
    absltest.main()
