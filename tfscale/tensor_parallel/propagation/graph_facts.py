"""Facts of a traced model, before anything is sharded."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.layer_calls import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """A tensor that enters or leaves a layer, where it can be converted.

    `operations` convert `before` to `after`; `mode` is how a rank does, None in
    the trace of a whole model. `position` is that among the layer's tensors.
    """

    boundary: Any
    position: tuple
    operations: range
    before: tf.Tensor
    after: tf.Tensor
    mode: str | None

    def as_call(self, key, mode: str, dim: int) -> LayerCall:
        """The conversion as a call, to compare traces."""
        if mode == "scatter":
            return LayerCall(
                key,
                self.operations,
                sources=(Source(self.after, dim),),
                inputs=(self.before,),
            )
        return LayerCall(
            key,
            self.operations,
            sinks=(Sink(self.before, dim),),
            outputs=(self.after,),
        )


@dataclasses.dataclass(eq=False)
class Span:
    """One call of a layer with a boundary, made within the call `around`."""

    boundary: Any
    around: "Span | None"
    operations: range = range(0)


def outwards(span: Span | None) -> Iterator[Span]:
    """A call and those that it is made within, innermost first."""
    while span is not None:
        yield span
        span = span.around


class GraphFacts:
    """The facts of a model that are the same in each pass.

    `spans` are calls of layers, outer ones first.

    Attributes:
        num_ranks: Number of shards of a sharded tensor.
        retraced: See `propagation.propagate`.
        fixed: Keys of the calls whose sources stay sharded for good.
        parameters: Names of the tensors that are trainable variables.
        needs_gradient: Names of the tensors whose gradient is needed.
        internal_tensors: The key of the call, by internal tensor.
        edges: Where tensors may be converted, by name of an operation.
    """

    def __init__(
        self,
        trace: Trace,
        differentiable: Iterable[tf.Tensor],
        *,
        num_ranks: int,
        retraced: bool,
        inputs: Iterable[tf.Tensor] = (),
        edges: Iterable[Edge] = (),
        spans: Iterable[Span] = (),
        fixed: frozenset = frozenset(),
    ):
        operations = trace.operations
        self.num_ranks = num_ranks
        self.retraced = retraced
        self.fixed = fixed
        self.parameters = frozenset(tensor.name for tensor in differentiable)
        self.needs_gradient = _needs_gradient(
            operations, self.parameters | {tensor.name for tensor in inputs}
        )
        self.internal_tensors = _internal_tensors(operations, trace.calls)
        self.edges = {edge.after.op.name: edge for edge in edges}
        self._spans = {
            operations[index].name: span
            for span in spans
            for index in span.operations
        }

    def span_of(self, op: tf.Operation) -> Span | None:
        """The innermost call that an operation belongs to."""
        return self._spans.get(op.name)

    def inputs_of(self, span: Span) -> list[Edge]:
        """Where tensors enter a call."""
        return [
            edge
            for edge in self.edges.values()
            if edge.position[0] == "in" and self.span_of(edge.after.op) is span
        ]


def _internal_tensors(operations, calls):
    """The key of the call for each internal tensor of a call."""
    kept = {}
    for call in calls:
        returned = {output.tensor.name for output in call.made}
        returned.update(tensor.name for tensor in call.outputs)
        internal, computed = set(), set()
        for index in call.operations:
            op = operations[index]
            names = {tensor.name for tensor in op.outputs}
            # Constants created inside (and kept, perhaps) are always the same.
            has_no_input = not op.inputs and op.type != "Const"
            if has_no_input or any(
                tensor.name not in internal or tensor.name in computed
                for tensor in op.inputs
            ):
                computed |= names
            internal |= names
        kept.update(dict.fromkeys(computed - returned, call.key))
    return kept


# Nothing flows back through these, whatever the type of their output.
_NO_GRADIENT = ("OnesLike", "StopGradient", "ZerosLike")


def _needs_gradient(operations, parameters):
    reached = set(parameters)
    for op in operations:
        if op.type not in _NO_GRADIENT and any(
            tensor.name in reached for tensor in op.inputs
        ):
            reached.update(
                tensor.name for tensor in op.outputs if is_real(tensor)
            )
    return reached


def is_real(tensor: tf.Tensor) -> bool:
    """Whether a gradient could flow through it (resources hold parameters)."""
    dtype = tensor.dtype
    return not (dtype.is_integer or dtype.is_bool or dtype == tf.string)
