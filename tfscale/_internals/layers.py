"""What layers of Keras and keras_hub have inside, for those that run by a rule.

Each name is listed in the tables beside, with why.
"""

from typing import Any

import keras
import tensorflow as tf

# What the `call` of a BatchNormalization consists of.
NORMALIZATION_PARTS = ("_moments",)
# Methods that look at the shapes of what a layer has put in, and no more.
METHODS_OF_SHAPES = ("_compute_attention_mask", "_compute_self_attention_mask")


def weight_of(layer: keras.Layer, name: str = "kernel") -> keras.Variable:
    """A kernel or a table itself, without what LoRA adds to it.

    Args:
        layer: The built layer.
        name: Of its property, `"kernel"` or `"embeddings"`.
    """
    return getattr(layer, f"_{name}")


def causal_padding(layer: keras.layers.Conv1D) -> Any:
    """How a causal convolution pads its input, by dim."""
    return layer._compute_causal_padding()


def moments(
    layer: keras.layers.BatchNormalization, x: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of a batch, as the layer takes them."""
    return layer._moments(x, mask)


def is_of_keras(method: Any) -> bool:
    """Whether a method is Keras' own, and not one of a user's class."""
    return getattr(method, "__module__", "").startswith("keras.src.")
