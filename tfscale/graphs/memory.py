"""Bytes of the tensors of a graph, known from their shapes."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.graphs import walks

# Operations whose result is the buffer of an input.
_ALIASES = (
    *("ExpandDims", "Identity", "PreventGradient", "Reshape"),
    *("Squeeze", "StopGradient"),
)
# Operations whose results exist before a graph runs.
_GIVEN = ("Const", "Placeholder", "ReadVariableOp")


def buffer_of(tensor: tf.Tensor) -> tf.Tensor:
    """The first tensor with the buffer of a tensor."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def tensor_bytes(tensor: tf.Tensor | tf.TensorSpec) -> int:
    """Bytes of a tensor; a `ValueError` says so if its size is not known."""
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            "Bytes of activations are known only where all sizes are. "
            f"Received: a tensor of shape {tensor.shape}. Trace the program "
            "for a batch that num_microbatches divides."
        )
    return math.prod(tensor.shape) * tensor.dtype.size


def peak_bytes(results: Sequence[tf.Tensor]) -> int:
    """Bytes that are in use at once when tensors are computed.

    Operations run in the order of their graph, and a buffer is freed after its
    last use. Variables, constants, arguments and workspace do not count. A
    result of an unknown size counts like the largest argument. A `ValueError`
    says so if there is a loop that keeps tensors of its iterations.
    """
    needed = walks.ancestors([x.op for x in results], control_inputs=True)
    operations = [x for x in results[0].graph.get_operations() if x in needed]
    last_use = {}
    for index, operation in enumerate(operations):
        used = [*operation.inputs, *operation.outputs]
        last_use.update((buffer_of(x).ref(), index) for x in used)
    for tensor in results:
        last_use[buffer_of(tensor).ref()] = len(operations)
    sizes: dict[Any, int] = {}
    freed_after: dict[int, int] = collections.Counter()
    in_use = peak = 0
    for index, operation in enumerate(operations):
        given = [sizes.get(x.ref(), 0) for x in operation.inputs]
        for tensor in operation.outputs if operation.type not in _GIVEN else ():
            if tensor.dtype == tf.variant:
                raise ValueError(
                    "Memory can be estimated where no loop keeps something of "
                    f"its iterations. Received: {operation.name!r}, of dtype "
                    "variant."
                )
            is_known = tensor.shape.is_fully_defined()
            size = tensor_bytes(tensor) if is_known else max(given, default=0)
            sizes[tensor.ref()] = size
            if operation.type not in _ALIASES:
                in_use += size
                freed_after[last_use[tensor.ref()]] += size
        peak = max(peak, in_use)
        in_use -= freed_after[index]
    return peak
