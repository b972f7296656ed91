"""Bytes of the tensors of a graph, known from their shapes."""

import math

import tensorflow as tf

# Operations whose result is the buffer of an input.
_ALIASES = (
    *("ExpandDims", "Identity", "PreventGradient", "Reshape"),
    *("Squeeze", "StopGradient"),
)


def buffer_of(tensor: tf.Tensor) -> tf.Tensor:
    """The first tensor with the buffer of a tensor."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def tensor_bytes(tensor: tf.Tensor | tf.TensorSpec) -> int:
    """Bytes of a tensor; a `ValueError` says so if its size is not known."""
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            "Bytes of activations need known sizes. Received: a tensor of "
            f"shape {tensor.shape}. Trace the program for a batch that "
            "num_microbatches divides."
        )
    return math.prod(tensor.shape) * tensor.dtype.size
