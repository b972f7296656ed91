"""Blocks of a transformer whose training says what a step takes.

A batch without examples would take what weights and products cost once; each
example adds its FLOPs and its activations:

    seconds
      |            .  many
      |       .
      |  .  few          slope: FLOPs, and activations through memory
      |.                 start: weights through memory, start of products
      +-------------- examples
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tfscale.planner.layers import Layer
from tfscale.planner.traced import trace_table

# Examples of the two batches.
FEW, MANY = 1, 16
_BLOCKS, _LENGTH, _HEADS = 3, 32, 4


class Blocks(NamedTuple):
    """A model of some blocks, and its layers as the planner sees them."""

    model: keras.Model
    layers: Sequence[Layer]

    @property
    def example_shape(self) -> tuple[int, int]:
        """The shape of an example."""
        return self.model.input_shape[1:]


class Fit(NamedTuple):
    """Attributes of a `Device` that a training of blocks says."""

    passes: float
    startup: float


def make_blocks(width: int) -> Blocks:
    """Blocks of a width, whose weights have no values."""
    build = functools.cache(functools.partial(_build, width))
    table = trace_table(build, [1])
    return Blocks(build(), table.by_ranks[1])


def fit(
    layers: Sequence[Layer],
    seconds: tuple[float, float],
    flops: float,
    bandwidth: float,
    weight_passes: float,
) -> Fit:
    """The attributes for which the planner predicts what was measured.

    Args:
        layers: Those of the blocks.
        seconds: Forward and backward of `FEW` and of `MANY` examples.
        flops: FLOP/s of the device.
        bandwidth: Bytes per second of its memory.
        weight_passes: As of `Device`.
    """

    def total(name):
        return sum(
            getattr(work, name)
            for layer in layers
            for work in (layer.forward, layer.backward)
        )

    few, many = seconds
    example = (many - few) / (MANY - FEW)
    once = few - FEW * example
    weights = 4 * sum(layer.trainable for layer in layers)
    moving = example - total("flops") / flops
    starting = once - weight_passes * weights / bandwidth
    return Fit(
        # An activation is written, at least.
        passes=max(moving * bandwidth / total("moved"), 1.0),
        startup=max(starting, 0.0) / total("products"),
    )


def training(blocks: Blocks, names: Sequence[str]) -> Callable[[Any], list]:
    """A function of inputs on each device: forward and backward there."""
    model, weights = blocks.model, {}
    width = blocks.example_shape[-1]
    for name in names:
        with tf.device(name):
            weights[name] = [
                # Products of such matrices neither grow nor vanish.
                tf.Variable(tf.fill(v.shape, 1 / width))
                for v in model.trainable_variables
            ]

    def train(xs):
        results = []
        for name, x in zip(names, xs, strict=True):
            with tf.device(name), tf.GradientTape() as tape:
                values = [w.read_value() for w in weights[name]]
                tape.watch(values)
                y, _ = model.stateless_call(values, [], x, training=True)
            with tf.device(name):
                gradients = tape.gradient(y, values)
                results.append(
                    tf.reduce_max([tf.reduce_max(g[:1]) for g in gradients])
                )
        return results

    return train


def _build(width):
    layers = keras.layers

    def normalized(x):
        return layers.LayerNormalization(dtype="float32")(x)

    def dense(units, activation=None):
        return layers.Dense(units, activation, dtype="float32")

    x = inputs = keras.Input((_LENGTH, width), dtype="float32")
    for _ in range(_BLOCKS):
        y = normalized(x)
        attention = layers.MultiHeadAttention(
            _HEADS, width // _HEADS, dtype="float32"
        )
        x = layers.Add(dtype="float32")([x, attention(y, y)])
        y = dense(width)(dense(4 * width, "gelu")(normalized(x)))
        x = layers.Add(dtype="float32")([x, y])
    return keras.Model(inputs, x)
