"""Finds a mean of one's own in gradients that are added up over replicas.

A loss of Keras comes divided by the number of replicas, and a mean beside it in
the same sum does not, unless who wrote it divides it. Of the sum an optimizer
only gets the gradients, but where they come from stands in the graph. A tape
begins with a one, as the gradient of the loss by itself, which goes through the
scalars of the loss backwards, multiplied by what they were multiplied by:

    1 ─┬─ * 1/N ─ ... ─ Tile ─ RealDiv    a loss of Keras, of N replicas
       └─ * beta ────── Tile ─ RealDiv    a mean of one's own: undivided

The gradient of a mean is a scalar, repeated for what it was made of and divided
by their count. What cannot be judged is taken for right.
"""

import math
import re
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tfscale.graphs import walks

_ONE = re.compile(r"(^|/)ones(_\d+)?$")
_BACKWARD = re.compile(r"(^|/)gradient_tape/")
# What makes many of a scalar, and what a scalar passes through unjudged.
_REPEATS = {"BroadcastTo", "Fill", "Tile"}
_PRODUCTS = {"Mul", "MulNoNan"}
_QUOTIENTS = {"DivNoNan", "RealDiv"}
_PASSES = {"AddN", "AddV2", "Cast", "Identity", "Neg", "Reshape"}


def has_undivided_mean(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    num_replicas: int,
) -> bool:
    """Whether a mean adds to gradients that nobody divided by the replicas.

    Args:
        gradients: Of one tape, in replica context. Of eager ones nothing is
            known.
        num_replicas: By what means are to be divided.
    """
    tensors = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g in gradients
        if g is not None
    ]
    if not tensors or tf.executing_eagerly():
        return False
    wanted = {tensor.op for tensor in tensors}
    for one in reversed(list(_ones(tensors[0].graph))):
        if _reached([one]) & wanted:
            means = _undivided_means(one, num_replicas)
            return bool(_reached(means, num_replicas) & wanted)
    return False


def _ones(graph) -> Iterable[tf.Operation]:
    """Scalars that a tape may have begun with; not those of gradients."""
    for op in graph.get_operations():
        if (
            op.type in ("Const", "Fill")
            and _ONE.search(op.name)
            and not _BACKWARD.search(op.name)
            and op.outputs[0].shape.rank == 0
        ):
            yield op


def _undivided_means(one, num_replicas):
    """The divisions in gradients of means to scalars of the loss."""
    found, seen, stack = [], {one}, [one]
    while stack:
        tensor = stack.pop().outputs[0]
        for op in tensor.consumers():
            if op in seen:
                continue
            seen.add(op)
            if op.type in _REPEATS:
                found += [
                    each
                    for each in op.outputs[0].consumers()
                    if each.type in _QUOTIENTS
                ]
            elif _goes_on(op, tensor, num_replicas):
                stack.append(op)
    return found


def _goes_on(op, tensor, num_replicas):
    """Whether it leaves a scalar one, that may have to be divided."""
    if op.outputs[0].shape.num_elements() != 1:
        return False
    if op.type not in _PRODUCTS | _QUOTIENTS:
        return op.type in _PASSES
    other = op.inputs[1] if op.inputs[0] is tensor else op.inputs[0]
    return not _divides(op, num_replicas) and _is_weight(other, num_replicas)


def _is_weight(tensor, num_replicas):
    """Whether a factor is of constants and variables, and divides nothing."""
    op = tensor.op
    if op.type == "ReadVariableOp" or tf.get_static_value(tensor) is not None:
        return True
    return (
        op.type in _PRODUCTS | _QUOTIENTS | _PASSES
        and not _divides(op, num_replicas)
        and all(_is_weight(each, num_replicas) for each in op.inputs)
    )


def _divides(op, num_replicas):
    """Whether it divides by the number of replicas, as Keras does."""
    if op.type not in _PRODUCTS | _QUOTIENTS:
        return False
    factor = num_replicas if op.type in _QUOTIENTS else 1.0 / num_replicas
    values = [tf.get_static_value(tensor) for tensor in op.inputs]
    # As float16 has it.
    return any(
        math.isclose(float(value), factor, rel_tol=1e-3)
        for value in values
        if value is not None and value.size == 1
    )


def _reached(ops, num_replicas=None):
    """What comes behind operations; not through divisions, if they count."""
    return walks.reachable(
        ops,
        lambda op: [
            consumer
            for tensor in op.outputs
            for consumer in tensor.consumers()
            if not (num_replicas and _divides(consumer, num_replicas))
        ],
    ).keys()
