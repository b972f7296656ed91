"""Layers that a branch, a loop or a cell calls stay whole, with right numbers.

Model ranks meet in the graph of the step only. Functional models ended in an
error of the analysis, subclassed ones in one that refused the call.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import crossings
from tests import same_numbers
from tests.tensor_parallel import summary_test

LAYERS = keras.layers
OPS = keras.ops


def branch(block, x):
    # Not known before it runs, or the branch would be unrolled.
    return OPS.cond(tf.timestamp() > 0, lambda: block(x), lambda: x)


def switch(block, x):
    return OPS.switch(
        OPS.cast(tf.timestamp() > 0, "int32"), [lambda x: x, block], x
    )


def loop(block, x):
    return OPS.fori_loop(0, 2, lambda i, x: block(x), x)


def rows(block, x):
    return OPS.map(lambda row: block(row[None])[0], x)


def scan(block, x):
    def step(carry, part):
        carry = block(carry + part)
        return carry, carry

    x = OPS.transpose(x, (1, 0, 2))
    _, x = OPS.scan(step, OPS.zeros_like(x[0]), x)
    return OPS.transpose(x, (1, 0, 2))


def function(block, x):
    return tf.function(block)(x)


def nested(block, x):
    return OPS.fori_loop(0, 2, lambda i, x: branch(block, x), x)


def outside_too(block, x):
    return branch(block, block(x))


KINDS = (branch, switch, loop, rows, scan, function, nested, outside_too)


class Block(LAYERS.Layer):
    """An MLP that `flow(block, x)` calls."""

    def __init__(self, flow):
        super().__init__(name="block")
        self.flow = flow
        self.up = LAYERS.Dense(24, activation="tanh", name="up")
        self.down = LAYERS.Dense(12, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 24))

    def call(self, x):
        return self.flow(lambda x: x + self.down(self.up(x)), x)


class Attention(LAYERS.Layer):
    """Attention that `flow(attend, x)` calls."""

    def __init__(self, flow):
        super().__init__(name="block")
        self.flow = flow
        self.attention = LAYERS.MultiHeadAttention(
            2, 6, use_bias=False, name="attention"
        )

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.flow(lambda x: x + self.attention(x, x), x)


class Cell(LAYERS.Layer):
    """A cell for `keras.layers.RNN`."""

    state_size = output_size = 12

    def __init__(self):
        super().__init__(name="cell")
        self.up = LAYERS.Dense(24, activation="tanh", name="up")
        self.down = LAYERS.Dense(12, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((shape[0], 24))

    def call(self, x, states):
        x = self.down(self.up(x + states[0]))
        return x, [x]


def functional(make):
    inputs = keras.Input((6, 12))
    x = make()(inputs)
    # Pairs outside stay sharded, and sequences between them.
    for index in range(2):
        y = LAYERS.Dense(24, activation="relu", name=f"wide_{index}")(x)
        y = LAYERS.Dense(12, name=f"narrow_{index}")(y)
        x = LAYERS.LayerNormalization(name=f"norm_{index}")(x + y)
    return keras.Model(inputs, x)


class Subclassed(keras.Model):
    """Calls a layer in code that is not looked into."""

    def __init__(self, make):
        super().__init__()
        self.block = make()

    def build(self, shape):
        self.block.build(shape)

    def call(self, x):
        return self.block(x)


def subclassed(make):
    model = Subclassed(make)
    model.build((None, 6, 12))
    return model


def recurrent():
    return LAYERS.RNN(Cell(), return_sequences=True, name="block")


def job(build, make):
    random = np.random.RandomState(0)
    return same_numbers.Job(
        functools.partial(build, make),
        dict(
            x=random.randn(32, 6, 12).astype("float32"),
            y=random.randn(32, 6, 12).astype("float32"),
            batch_size=16,
        ),
    )


CASES = {
    **{kind.__name__: functools.partial(Block, kind) for kind in KINDS},
    "attention": functools.partial(Attention, branch),
    "cell": recurrent,
}


class ControlFlowTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *crossings.pairs(
            name=CASES, build=[functional, subclassed], sizes=[(1, 2), (2, 2)]
        )
    )
    @pytest.mark.crossing(every=20)
    def test_numbers_of_one_device(self, name, build, sizes):
        trained = job(build, CASES[name])
        expected = same_numbers.on_one_device(trained)
        found = same_numbers.on_ranks(trained, sizes[1], sizes[0])
        same_numbers.assert_same(self, expected, found)

    @parameterized.parameters("branch", "outside_too", "attention", "cell")
    @pytest.mark.crossing
    def test_with_sequence_parallelism(self, name):
        trained = job(functional, CASES[name])
        expected = same_numbers.on_one_device(trained)
        mesh = tfscale.device_mesh(model=2)
        layouts = same_numbers.layout_map_for(trained, mesh, None)
        same_numbers.reset()
        strategy = tfscale.MeshStrategy(mesh, layouts, sequence_parallel=True)
        with strategy.scope():
            model = trained.build()
            model.compile(trained.optimizer(), "mse")
        model.fit(**trained.data, shuffle=False, verbose=0)
        for variable in model.variables:
            same_numbers.assert_close(
                variable.numpy(), expected.variables[variable.path]
            )

    def test_summary_says_which_layers_are_gathered(self):
        with tfscale.MeshStrategy(
            tfscale.device_mesh(model=2),
            {
                ".*up/kernel": (None, "model"),
                ".*down/kernel": ("model", None),
                "wide_./kernel": (None, "model"),
                "narrow_./kernel": ("model", None),
            },
        ).scope():
            model = functional(functools.partial(Block, branch))
        text = summary_test.summary(model)
        for layer in ("block/up", "block/down"):
            _, how = summary_test.cells(text, layer)[0]
            self.assertEqual(how, "gathered")
        self.assertIn("output sharded", summary_test.cells(text, "wide_0")[0])
        self.assertRegex(text, "Gathered, block/up: a branch, a loop")
