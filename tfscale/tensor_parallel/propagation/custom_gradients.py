"""Gradients that were written by hand, as operations to be looked at.

They refer to tensors of the model, so they are traced into its own graph, after
its operations and once, and are left out when the model is looked at again.
"""

import dataclasses

import tensorflow as tf

from tfscale.tensor_parallel.propagation.placements import NoRule

_COLLECTION = "tfscale_custom_gradients"


@dataclasses.dataclass(frozen=True)
class CustomGradient:
    """The operations of a gradient, or why it could not be traced.

    `given` are the gradients of the outputs, `results` those of the inputs,
    None where there is none.
    """

    given: list
    operations: list
    results: list
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class _Traced:
    start: int  # number of operations of the model
    gradients: dict


def model_operations(graph: tf.Graph) -> list:
    """The operations of a graph without the gradients traced by this file."""
    traced = graph.get_collection(_COLLECTION)
    operations = graph.get_operations()
    return operations[: traced[0].start] if traced else operations


def custom_gradient(op: tf.Operation) -> CustomGradient:
    """Traces the gradient of an operation, or raises `NoRule`."""
    traced = op.graph.get_collection(_COLLECTION)
    if not traced:
        traced = [_Traced(len(op.graph.get_operations()), {})]
        op.graph.add_to_collection(_COLLECTION, traced[0])
    gradients = traced[0].gradients
    if op.name not in gradients:
        gradients[op.name] = _trace(op)
    if gradients[op.name].error:
        raise NoRule(f"its custom gradient: {gradients[op.name].error}")
    return gradients[op.name]


def _trace(op):
    start = len(op.graph.get_operations())
    results, error = [], None
    with op.graph.as_default():
        given = [
            tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
            for tensor in op.outputs
        ]
        try:
            results = tf.gradients(
                list(op.outputs), list(op.inputs), grad_ys=given
            )
        # Code of whoever wrote the gradient: it may raise anything.
        except Exception as raised:
            error = str(raised) or type(raised).__name__
    operations = op.graph.get_operations()[start:]
    return CustomGradient(given, operations, results, error)
