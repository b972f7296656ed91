"""Gradients that were written by hand, as operations to check.

They refer to tensors of the model, so they are traced once into its graph,
after its operations, and are left out of later passes.
"""

from typing import NamedTuple

import tensorflow as tf

from tfscale.tensor_parallel.propagation.labels import NoRule

_COLLECTION = "tfscale_custom_gradients"


class CustomGradient(NamedTuple):
    """Gradients of outputs, operations, and gradients of inputs, or None."""

    given: list
    operations: list
    results: list


def model_operations(graph: tf.Graph) -> list:
    """The operations of a graph without the gradients traced by this file."""
    count, _ = _traced(graph) or (None, None)
    return graph.get_operations()[:count]


def custom_gradient(op: tf.Operation) -> CustomGradient:
    """Traces the gradient of an operation, or raises `NoRule`."""
    traced = _traced(op.graph)
    if traced is None:
        traced = len(op.graph.get_operations()), {}
        op.graph.add_to_collection(_COLLECTION, traced)
    _, gradients = traced
    if op.name not in gradients:
        gradients[op.name] = _trace(op)
    if isinstance(gradients[op.name], str):
        raise NoRule(f"its custom gradient: {gradients[op.name]}")
    return gradients[op.name]


def _traced(graph):
    """The number of the model's operations, and gradients by operation."""
    return next(iter(graph.get_collection(_COLLECTION)), None)


def _trace(op):
    """The gradient, or why it cannot be traced."""
    start = len(op.graph.get_operations())
    with op.graph.as_default():
        given = [
            tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
            for tensor in op.outputs
        ]
        try:
            results = tf.gradients(
                list(op.outputs), list(op.inputs), grad_ys=given
            )
        except Exception as error:  # of the code of a user
            return str(error) or type(error).__name__
    return CustomGradient(given, op.graph.get_operations()[start:], results)
