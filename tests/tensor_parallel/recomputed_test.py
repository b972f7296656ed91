"""Layers under `keras.remat`, on model ranks and on replicas."""

import contextlib

import keras
import numpy as np
import pytest
from absl.testing import parameterized

import tfscale
from tests import executed_functions
from tests import same_numbers

WIDTH = 64
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(8, 6, WIDTH)).astype("float32")
Y = RANDOM.normal(size=(8, 6, 4)).astype("float32")
LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
MESHES = (
    ("ranks", dict(model=2), LAYOUTS, {}),
    ("replicas_and_ranks", dict(data=2, model=2), LAYOUTS, {}),
    ("replicas", dict(data=2), None, {}),
    ("sharded_slots", dict(data=2), None, dict(zero_stage=1)),
    ("sharded_weights", dict(data=2), None, dict(zero_stage=3)),
)


class Block(keras.layers.Layer):
    """A block of a transformer without attention, recomputed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.up = keras.layers.Dense(4 * WIDTH, "gelu", name="up")
        self.down = keras.layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        return x + keras.remat(lambda x: self.down(self.up(self.norm(x))))(x)


def build(strategy=None):
    same_numbers.reset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = x = keras.Input((6, WIDTH))
        for index in range(2):
            x = Block(name=f"block_{index}")(x)
        model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(sgd, "mse", run_eagerly=strategy is None)
    return model


def mesh_strategy(axes, layouts, options):
    return tfscale.MeshStrategy(tfscale.device_mesh(**axes), layouts, **options)


class RecomputedTest(parameterized.TestCase):
    @parameterized.named_parameters(*MESHES)
    @pytest.mark.crossing(every=5)
    def test_numbers_are_those_of_one_device(self, *mesh):
        def losses(model):
            return [float(model.train_on_batch(X, Y)) for _ in range(3)]

        plain = build()
        expected = losses(plain)
        model = build(mesh_strategy(*mesh))
        with executed_functions.executed_functions() as found:
            np.testing.assert_allclose(losses(model), expected, rtol=1e-6)
        for one, other in zip(plain.weights, model.weights):
            np.testing.assert_allclose(
                other.numpy(), one.numpy(), 1e-5, 1e-6, err_msg=one.path
            )
        # The backward reads weights before their update.
        step = executed_functions.largest(found)
        num_updates, unordered = executed_functions.reads_without_order(step)
        self.assertGreaterEqual(num_updates, len(model.trainable_variables))
        self.assertEmpty(unordered)
