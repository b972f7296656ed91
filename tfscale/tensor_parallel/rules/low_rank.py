"""Kernels and tables that are fine-tuned by a product of low rank.

`enable_lora` of a Keras layer adds a product to its kernel, `K + s A B`, and
trains A and B in its place. A rank needs the part of the product that belongs
to its shard: along the last dim of K a part of B, along others one of A. The
other factor is used by each rank for a part of its own.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2022),
equation 3.
"""

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.sharding.of_variable import sharding_of
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel.rules import rules


def shard_of(layer, name: str):
    """This rank's shard of what a layer computes with.

    Args:
        layer: The layer.
        name: Of the property of the layer, `"kernel"` or `"embeddings"`.
    """
    weight = _internals.weight_of(layer, name)
    shard = rules.shard_of(weight)
    if not layer.lora_enabled:
        return shard
    a, b = (getattr(layer, f"lora_{name}_{letter}") for letter in "ab")
    dim = sharding_of(weight).model_dim
    if dim == len(weight.shape) - 1:
        a, b = _for_parts(a), rules.local_shard_along(b, 1)
    else:
        a, b = rules.local_shard_along(a, dim), _for_parts(b)
    scale = layer.lora_alpha / layer.lora_rank
    total = keras.ops.add(shard, scale * keras.ops.matmul(a, b))
    return keras.ops.cast(total, layer.compute_dtype)


def _for_parts(variable):
    return collectives.copy_to_ranks(tf.convert_to_tensor(variable))
