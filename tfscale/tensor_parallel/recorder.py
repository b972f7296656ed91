"""What is noted of layers while a model is traced to be looked at.

In the trace of a whole model there is an Identity where a tensor enters or
leaves a layer; in that of a rank, what a plan does with it there.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import rank_context
from tfscale.tensor_parallel.propagation.boundaries import Edge
from tfscale.tensor_parallel.propagation.boundaries import Span
from tfscale.tensor_parallel.sequence_parallel import sequence


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call of a layer with a rule.

    Attributes:
        rule: The `rules.Rule`.
        operations: Indices of its operations in the graph.
        inputs: First argument of the call.
        outputs: What the call returned.
        divides: Whether the output can be sharded.
        scatters: See `Rule.scatters`.
    """

    rule: Any
    operations: range
    inputs: Any
    outputs: Any
    divides: bool
    scatters: bool | None


class Recorder:
    """Asked by the layers of a model that is traced.

    Args:
        num_parts: 1 for whole tensors; the number of ranks for tensors of the
            shapes that a rank has.
        has_edges: Whether to note where tensors enter and leave layers.

    Attributes:
        calls: Calls of layers with rules, outermost ones only.
        edges: Where tensors enter and leave layers.
        spans: Calls of layers, in the order in which they begin.
        num_parts: As given.
        is_inside: Whether a call of a layer with a rule is under way.
    """

    def __init__(self, num_parts: int = 1, has_edges: bool = False):
        self.calls: list[RecordedCall] = []
        self.edges: list[Edge] = []
        self.spans: list[Span] = []
        self.num_parts = num_parts
        self.is_inside = False
        self._has_edges = has_edges
        self._span: Span | None = None

    def run_with_edges(self, boundary, method: Callable, args, kwargs):
        """Calls a method of a layer with a boundary around it."""
        if self.is_inside or not self._has_edges:
            return method(*args, **kwargs)
        before = self._span
        self._span = span = Span(boundary, before)
        self.spans.append(span)
        start = num_operations()

        def convert(place, tensor):
            return self._convert(boundary, place, tensor)

        try:
            args, kwargs = sequence.map_inputs(convert, args, kwargs)
            outputs = method(*args, **kwargs)
            return sequence.map_outputs(convert, outputs)
        finally:
            span.operations = range(start, num_operations())
            self._span = before

    def _convert(self, boundary, place, tensor):
        start, plan = num_operations(), sequence.current()
        conversion = plan and plan.conversions.get((id(boundary), place))
        mode = None
        if conversion and conversion.fits(tensor, self.num_parts):
            mode = conversion.mode
        if mode is None:
            after = tf.identity(tensor)
        elif mode == "scatter":
            after = tf.split(tensor, self.num_parts, conversion.dim)[0]
        else:
            after = tf.concat([tensor] * self.num_parts, conversion.dim)
        operations = range(start, num_operations())
        self.edges.append(
            Edge(boundary, place, operations, tensor, after, mode)
        )
        return sequence.with_mask(after, tensor)


def current() -> Recorder | None:
    """The recorder of this thread, if it traces a model."""
    return rank_context.current().calls.recorder


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Within it, layers are recorded, and no ranks meet."""
    with rank_context.within(recorder=recorder):
        yield recorder


def num_operations() -> int:
    """How many operations the graph has so far."""
    return len(tf.compat.v1.get_default_graph().get_operations())
