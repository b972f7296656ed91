"""Where tensors enter and leave the layers of a traced model."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """A tensor enters or leaves a layer, and can be converted there.

    Attributes:
        boundary: The `sequence.Boundary` of the layer.
        place: Which of the layer's tensors.
        operations: Indices of the operations that convert it in the graph.
        before: The tensor.
        after: The converted tensor.
        mode: How a rank converts it; None in the trace of a whole model.
    """

    boundary: Any
    place: tuple
    operations: range
    before: tf.Tensor
    after: tf.Tensor
    mode: str | None

    def as_call(self, key, mode: str, dim: int) -> LayerCall:
        """The conversion, for a comparison of traces."""
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
    """One call of a layer with a boundary.

    Attributes:
        boundary: That of the layer.
        around: The call that it is made in.
        operations: Indices of its operations.
    """

    boundary: Any
    around: "Span | None"
    operations: range = range(0)


class Boundaries:
    """The calls of layers in a graph, and the edges of each.

    Args:
        operations: Those of the model.
        edges: Where tensors enter and leave layers.
        spans: Calls of layers, outer ones first.
        parameters: Names of the tensors that are trainable variables.
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
            if edge.place[0] == "in":
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
