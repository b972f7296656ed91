"""The internals of layers of Keras and keras_hub that run by a rule.

Each name is listed in the tables beside, with why.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import instances


@dataclasses.dataclass(frozen=True)
class AttentionNames:
    """Attributes of an attention.

    Attributes:
        counts: Numbers of heads, or of entries for all heads, which ranks
            divide.
        repeats: How often keys and values are repeated for the queries.
    """

    counts: tuple[str, ...] = ()
    repeats: str | None = None


def _path(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


_GEMMA = AttentionNames(
    counts=("num_query_heads", "num_key_value_heads", "hidden_dim")
)
_HUB = "keras_hub.src.models."
ATTENTIONS = {
    _path(keras.layers.MultiHeadAttention): AttentionNames(),
    _path(keras.layers.GroupQueryAttention): AttentionNames(
        repeats="num_repeats"
    ),
    f"{_HUB}llama.llama_attention.LlamaAttention": AttentionNames(
        repeats="num_key_value_groups"
    ),
    f"{_HUB}mistral.mistral_attention.CachedMistralAttention": AttentionNames(
        repeats="_num_key_value_groups"
    ),
    f"{_HUB}qwen.qwen_attention.QwenAttention": AttentionNames(
        repeats="num_key_value_groups"
    ),
    f"{_HUB}gemma.gemma_attention.CachedGemmaAttention": _GEMMA,
    f"{_HUB}gemma3.gemma3_attention.CachedGemma3Attention": _GEMMA,
}

_MASKED = {
    "layers/modeling/transformer_decoder.py": "_compute_self_attention_mask",
    "models/gemma/gemma_decoder_block.py": "_compute_attention_mask",
    "models/gemma3/gemma3_decoder_block.py": "_compute_attention_mask",
    "models/llama/llama_decoder.py": "_compute_self_attention_mask",
    "models/mistral/mistral_transformer_decoder.py": (
        "_compute_self_attention_mask"
    ),
    "models/qwen/qwen_decoder.py": "_compute_self_attention_mask",
}


def weight_of(layer: keras.Layer, name: str = "kernel") -> keras.Variable:
    """A kernel or a table itself, without LoRA."""
    return next(weight for weight in layer.weights if weight.name == name)


def with_weight(
    layer: keras.Layer, name: str, weight: Any, **others: Any
) -> keras.Layer:
    """The same layer with another kernel or table, and other attributes."""
    before = weight_of(layer, name)
    names = [
        name
        for name, value in instances.attributes_of(layer).items()
        if value is before
    ]
    return instances.altered(layer, **dict.fromkeys(names, weight), **others)


def moments(
    layer: keras.layers.BatchNormalization, x: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of a batch, as the layer computes them."""
    return layer._moments(x, mask)


def is_of_keras(found: Any) -> bool:
    """Whether a method or a class is of Keras, and not of a user."""
    return getattr(found, "__module__", "").startswith("keras.src.")


def attention_class(layer: keras.Layer) -> type | None:
    """The class of `ATTENTIONS` that a layer is of, if it is of one."""
    kinds = (x for x in layer.__class__.__mro__ if _path(x) in ATTENTIONS)
    return next(kinds, None)


def private_methods(kind: type) -> list[str]:
    """The methods of a class, its `call` among those that use them."""
    found = [name for name, x in vars(kind).items() if inspect.isfunction(x)]
    return [x for x in found if x.startswith("_") and not x.startswith("__")]


def attention_names(layer: keras.Layer) -> AttentionNames:
    """The names of the heads of an attention of a class of `ATTENTIONS`."""
    kind: Any = attention_class(layer)
    return ATTENTIONS[_path(kind)]


def attention_dense(layer: keras.Layer, name: str) -> Any:
    """The projection `"query"`, `"key"`, `"value"` or `"attention_output"`.

    By its name, which is in the paths of its weights. Few have a `"gate"`: else
    it is None.
    """
    return next((each for each in layer._layers if each.name == name), None)


def num_attention_axes(layer: keras.Layer) -> int:
    """The number of input dims that an attention covers."""
    return len(getattr(layer, "attention_axes", None) or (1,))


def hub_rows() -> Iterator[tuple[str, str, str]]:
    """Every private name of keras_hub that tfscale relies on.

    The path of a file, a name in it, and why. keras_hub need not be there, and
    is not imported: its files are read. They are of attentions that run on
    shards of their heads; of a model whose file is not there nothing is
    expected.
    """
    for path, name in _MASKED.items():
        yield f"keras_hub/src/{path}", name, "looks at whole shapes"
    for kind, names in ATTENTIONS.items():
        if not kind.startswith("keras_hub."):
            continue
        path = kind.rpartition(".")[0].replace(".", "/") + ".py"
        for name in names.counts:
            yield path, name, "a rank has a part of them"
        if names.repeats:
            yield path, names.repeats, "keys and values are repeated"
