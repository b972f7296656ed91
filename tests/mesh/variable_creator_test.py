"""Layers of a model that is built by running it are sharded like others."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests import same_numbers

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(48, 5, 8).astype("float32")
LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
    ".*attention/(query|key|value)/kernel": (None, "model", None),
    ".*attention/(query|key|value)/bias": ("model", None),
    ".*attention/attention_output/kernel": ("model", None, None),
}


class Block(keras.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        self.up = keras.layers.Dense(12, activation="relu", name="up")
        self.down = keras.layers.Dense(8, name="down")

    def call(self, x):
        return self.down(self.up(x + self.attention(x, x)))


class Model(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.block = Block(name="block")

    def call(self, x):
        return self.block(x)


def build():
    model = Model()
    model(X[:2])
    return model


def job():
    return same_numbers.Job(build, dict(x=X, y=X, batch_size=16))


class SynchronizationTest(tf.test.TestCase):
    def test_none_is_an_error(self):
        none = tf.VariableSynchronization.NONE
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
        with strategy.scope(), self.assertRaisesRegex(ValueError, "'v'.* NONE"):
            tf.Variable(1.0, synchronization=none, name="v")


class LateVariablesTest(tf.test.TestCase):
    def test_has_the_numbers_of_one_device_and_is_sharded(self):
        outcome = same_numbers.on_ranks(job(), 2, layouts=LAYOUTS)
        same_numbers.assert_same(
            self,
            same_numbers.on_one_device(job()),
            outcome,
            unmoved=("key_bias",),
        )
        block = outcome.model.block
        for variable, shape in (
            (block.up.kernel, (8, 6)),
            (block.up.bias, (6,)),
            (block.down.kernel, (6, 8)),
            (block.down.bias, (8,)),
            (block.attention.query_dense.kernel, (8, 1, 4)),
            (block.attention.output_dense.kernel, (1, 4, 8)),
        ):
            for component in variable.value.values:
                self.assertEqual(component.shape, shape, variable.path)
        # They run by their rules, not on weights put together.
        attention = block.attention
        for layer in (
            *(block.up, block.down),
            *(attention.query_dense, attention.output_dense),
        ):
            self.assertIsNotNone(layer.sharded_call.rule, layer.name)

    def test_what_fit_builds_has_statistics_of_the_whole_batch(self):
        """Each replica, and each worker, had those of its own part."""

        def fit(*first):
            keras.utils.set_random_seed(1)
            with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
                norm = keras.layers.BatchNormalization(momentum=0.5)
                model = keras.Sequential([*first, norm, keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            x = X[:8, 0]
            model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
            return norm.moving_mean.value.values

        expected = fit(keras.Input((8,)))[0]
        for component in fit():
            np.testing.assert_allclose(component, expected, rtol=1e-6)

    def test_what_fit_builds_is_an_error_that_says_what_to_do(self):
        mesh = tfscale.device_mesh(model=2)
        with tfscale.MeshStrategy(mesh, LAYOUTS).scope():
            model = Model()
            model.compile("sgd", "mse")
        with self.assertRaisesRegex(
            ValueError, "left to `fit` to build. Call it on a batch"
        ):
            model.fit(X, X, verbose=0)


if __name__ == "__main__":
    tf.test.main()
