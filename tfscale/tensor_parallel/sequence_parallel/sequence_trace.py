"""Notes where tensors enter and leave layers, while a model is traced.

In the trace of the whole model there is an Identity at each of these places.
In that of a rank, what a plan does with a tensor of that shape.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf

from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.layer_calls import Trace
from tfscale.tensor_parallel.rules import sharded_call
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel.sequence import Crossing


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A tensor enters or leaves a layer.

    Attributes:
        crossing: Of which layer.
        place: Which of its tensors.
        operations: Places of what was made for it in the graph.
        before: The tensor.
        after: The tensor behind.
        mode: What is done with it, None if nothing.
    """

    crossing: Crossing
    place: tuple
    operations: range
    before: tf.Tensor
    after: tf.Tensor
    mode: str | None

    @property
    def name(self) -> str:
        """Name of its operation."""
        return self.after.op.name

    def as_call(self, key, mode, dim) -> LayerCall:
        """The same for a comparison of traces."""
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
class CallSpan:
    """A call of a layer.

    Attributes:
        crossing: Of the layer.
        around: The call that it is made in.
        operations: Places of its operations.
    """

    crossing: Crossing
    around: "CallSpan | None"
    operations: range = range(0)


class Recorder:
    """What crossings ask while a model is traced.

    Args:
        plan: What is done at them; nothing, if None.
        num_parts: As of `sharded_call.recording`.

    Attributes:
        points: In their order.
        spans: In the order in which the calls begin.
    """

    def __init__(
        self, plan: sequence.SequencePlan | None = None, num_parts: int = 1
    ):
        self.points = []
        self.spans = []
        self._plan = plan
        self._num_parts = num_parts
        self._inside: CallSpan | None = None

    def call(self, crossing: Crossing, method: Callable, args, kwargs):
        """Calls the method that a crossing is around."""
        if sharded_call.is_inside():
            return method(*args, **kwargs)
        span = CallSpan(crossing, self._inside)
        self.spans.append(span)
        start, before = _num_operations(), self._inside
        self._inside = span

        def cross(place, tensor):
            return self._cross(crossing, place, tensor)

        try:
            args, kwargs = sequence.map_inputs(cross, args, kwargs)
            outputs = method(*args, **kwargs)
            return sequence.map_outputs(cross, outputs)
        finally:
            span.operations = range(start, _num_operations())
            self._inside = before

    def _cross(self, crossing, place, tensor):
        start, mode = _num_operations(), None
        if self._plan is not None:
            conversion = self._plan.conversions.get((id(crossing), place))
            if conversion and conversion.fits(tensor, self._num_parts):
                mode = conversion.mode
        if mode is None:
            after = tf.identity(tensor)
        elif mode == "scatter":
            after = tf.split(tensor, self._num_parts, conversion.dim)[0]
        else:
            after = tf.concat([tensor] * self._num_parts, conversion.dim)
        self.points.append(
            Point(
                crossing,
                place,
                range(start, _num_operations()),
                tensor,
                after,
                mode,
            )
        )
        return sequence.with_mask(after, tensor)


class SequenceTrace:
    """A whole model as it was traced.

    Args:
        trace: The graph and the calls of layers with rules.
        recorder: What was noted.
        parameters: Names of the tensors that are trainable variables.
        takes_shared: Keys of the calls that share a whole input.
    """

    def __init__(self, trace: Trace, recorder, parameters, takes_shared):
        self.trace = trace
        self.points = {point.name: point for point in recorder.points}
        self.parameters = parameters
        self.takes_shared = takes_shared
        operations = trace.operations
        self._places = {op.name: place for place, op in enumerate(operations)}
        self._spans = [None] * len(operations)
        for span in recorder.spans:  # outer ones come first
            for place in span.operations:
                self._spans[place] = span
        self._entrances = {}
        for point in recorder.points:
            if point.place[0] == "in":
                span = self._spans[point.operations.start]
                self._entrances.setdefault(span, []).append(point)

    def span_of(self, op: tf.Operation) -> CallSpan | None:
        """The innermost call that an operation belongs to."""
        place = self._places.get(op.name)
        return None if place is None else self._spans[place]

    def span_at(self, place: int) -> CallSpan | None:
        """The innermost call around a place in the graph."""
        return self._spans[place] if place < len(self._spans) else None

    def around(self, span: CallSpan | None) -> Iterator[CallSpan]:
        """A call, and those around it."""
        while span is not None:
            yield span
            span = span.around

    def entrances(self, span: CallSpan) -> list[Point]:
        """Where tensors enter a call."""
        return self._entrances.get(span, [])


def _num_operations():
    return len(tf.compat.v1.get_default_graph().get_operations())
