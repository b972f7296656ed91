"""Facts of a traced model, before anything is sharded."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.tensor_parallel.propagation import layer_calls
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


class Boundaries:
    """The calls of layers in a graph, outer ones first, and the edges of each.

    `parameters` are names of the tensors that are trainable variables.
    """

    def __init__(
        self,
        operations: Iterable[tf.Operation] = (),
        edges: Iterable[Edge] = (),
        spans: Iterable[Span] = (),
        parameters: frozenset[str] = frozenset(),
    ):
        self.edges = {edge.after.op.name: edge for edge in edges}
        self.parameters = parameters
        self._spans: dict[str, Span] = {}
        names = [op.name for op in operations]
        for span in spans:
            for index in span.operations:
                self._spans[names[index]] = span
        self._inputs: dict[Span, list[Edge]] = {}
        for edge in self.edges.values():
            if edge.position[0] == "in":
                span = self._spans[edge.after.op.name]
                self._inputs.setdefault(span, []).append(edge)

    def span_of(self, op: tf.Operation) -> Span | None:
        """The innermost call that an operation belongs to."""
        return self._spans.get(op.name)

    def around(self, op: tf.Operation) -> Iterator[Span]:
        """The calls that an operation belongs to, innermost first."""
        span = self.span_of(op)
        while span is not None:
            yield span
            span = span.around

    def inputs_of(self, span: Span) -> list[Edge]:
        """Where tensors enter a call."""
        return self._inputs.get(span, [])


@dataclasses.dataclass(frozen=True)
class GraphFacts:
    """The facts of a model that are the same in each pass.

    Attributes:
        num_ranks: Number of shards of a sharded tensor.
        retraced: See `propagation.propagate`.
        needs_gradient: Names of the tensors whose gradient is needed.
        internal_tensors: The key of the call, by internal tensor.
        boundaries: Where tensors may be converted between layers.
        fixed: Keys of the calls whose sources stay sharded for good.
    """

    num_ranks: int
    retraced: bool
    needs_gradient: frozenset
    internal_tensors: dict
    boundaries: Boundaries = dataclasses.field(default_factory=Boundaries)
    fixed: frozenset = frozenset()


def facts_of(
    trace: Trace,
    differentiable: Iterable[tf.Tensor],
    *,
    num_ranks: int,
    retraced: bool,
    **others: Any,
) -> GraphFacts:
    """The facts of a model; see `propagation.propagate`."""
    layer_calls.check_calls(trace, num_ranks)
    operations = trace.operations
    return GraphFacts(
        num_ranks,
        retraced,
        needs_gradient(operations, differentiable),
        internal_tensors(operations, trace.calls),
        **others,
    )


def internal_tensors(operations: list, calls: Sequence[LayerCall]) -> dict:
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


def needs_gradient(
    operations: list, differentiable: Iterable[tf.Tensor]
) -> frozenset:
    """Names of the tensors whose gradient is needed."""
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
