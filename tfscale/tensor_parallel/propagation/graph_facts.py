"""What the analysis knows of a traced model before it divides anything."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.propagation.boundaries import Boundaries
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Trace


@dataclasses.dataclass(frozen=True)
class GraphFacts:
    """What is the same in each pass.

    Attributes:
        num_ranks: Number of parts of a sharded tensor.
        retraced: See `propagation.propagate`.
        needs_gradient: Names of the tensors that a gradient is needed of.
        insides: Key of the call for each tensor that a call keeps to itself.
        boundaries: Where tensors may be converted between layers.
        decided: Keys of the calls whose sources stay sharded for good.
    """

    num_ranks: int
    retraced: bool
    needs_gradient: frozenset
    insides: dict
    boundaries: Boundaries = dataclasses.field(default_factory=Boundaries)
    decided: frozenset = frozenset()


def facts_of(
    trace: Trace,
    differentiable: Iterable[tf.Tensor],
    *,
    num_ranks: int,
    retraced: bool,
    **others: Any,
) -> GraphFacts:
    """What is known of a model; see `propagation.propagate`."""
    layer_calls.check_calls(trace, num_ranks)
    operations = trace.operations
    return GraphFacts(
        num_ranks,
        retraced,
        needs_gradient(operations, differentiable),
        insides(operations, trace.calls),
        **others,
    )


def insides(operations: list, calls: Sequence[LayerCall]) -> dict:
    """Key of the call for each tensor that a call makes and keeps to itself."""
    kept = {}
    for call in calls:
        returned = {part.tensor.name for part in call.made}
        returned.update(tensor.name for tensor in call.outputs)
        own, computed = set(), set()
        for place in call.operations:
            op = operations[place]
            names = {tensor.name for tensor in op.outputs}
            # Constants made on the way (and kept, perhaps) are always the same.
            has_no_input = not op.inputs and op.type != "Const"
            if has_no_input or any(
                tensor.name not in own or tensor.name in computed
                for tensor in op.inputs
            ):
                computed |= names
            own |= names
        kept.update(dict.fromkeys(computed - returned, call.key))
    return kept


# Nothing flows back through these, whatever the type of their output.
_NO_GRADIENT = ("OnesLike", "StopGradient", "ZerosLike")


def needs_gradient(
    operations: list, differentiable: Iterable[tf.Tensor]
) -> frozenset:
    """Names of the tensors that a gradient is needed of."""
    reached = {tensor.name for tensor in differentiable}
    for op in operations:
        if op.type not in _NO_GRADIENT and any(
            tensor.name in reached for tensor in op.inputs
        ):
            reached.update(
                tensor.name for tensor in op.outputs if is_real(tensor)
            )
    return frozenset(reached)


def is_real(tensor: tf.Tensor) -> bool:
    """Whether a gradient could flow through it (resources hold parameters)."""
    dtype = tensor.dtype
    return not (dtype.is_integer or dtype.is_bool or dtype == tf.string)
