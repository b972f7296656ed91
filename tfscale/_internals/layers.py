"""What layers of Keras and keras_hub have inside, for those that run by a rule.

Each name is listed in the tables beside, with why.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# What the `call` of an attention consists of, beside its projections.
ATTENTION_PARTS = ("_compute_attention", "_masked_softmax")
# Likewise of a BatchNormalization.
NORMALIZATION_PARTS = ("_moments",)
# How often an attention repeats keys and values for the queries.
ATTENTION_REPEATS = (
    "num_repeats",
    "num_key_value_groups",
    "_num_key_value_groups",
)
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


def is_hub_attention(layer: keras.Layer, families: Sequence[str]) -> bool:
    """Whether all of an attention is as one of keras_hub's families has it.

    Args:
        layer: The layer, perhaps of a subclass.
        families: Names such as "llama".
    """
    modules = {
        getattr(layer.__class__, name).__module__
        for name in ("call", *ATTENTION_PARTS)
        if hasattr(layer.__class__, name)
    }
    return len(modules) == 1 and modules <= {
        f"keras_hub.src.models.{name}.{name}_attention" for name in families
    }


def is_of_keras(method: Any) -> bool:
    """Whether a method is Keras' own, and not one of a user's class."""
    return getattr(method, "__module__", "").startswith("keras.src.")


def attention_dense(layer: keras.Layer, name: str) -> keras.Layer:
    """The `"query"`, `"key"`, `"value"` or `"output"` projection.

    Of some families of keras_hub the names have no underscore.
    """
    own = f"_{name}_dense"
    return getattr(layer, own if hasattr(layer, own) else own[1:])


def attention_gate(layer: keras.Layer) -> keras.Layer | None:
    """The projection that gates the heads, if there is one."""
    return getattr(layer, "_gate_dense", None)


def num_attention_axes(layer: keras.Layer) -> int:
    """Over how many dims of its input an attention goes."""
    return len(getattr(layer, "_attention_axes", None) or (1,))
