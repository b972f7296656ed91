"""What to change where a sum cannot stay sharded along the sequence.

From the operation that cannot take a sharded tensor, or a weight that each rank
uses for itself, the way goes back through the graph to the nearest places at
which a tensor enters or leaves a layer. There a change is proposed: to put the
tensor together, to divide it, or to have the layer use its weights on parts.
"""

import collections

from tfscale.tensor_parallel.propagation import propagation_walk
from tfscale.tensor_parallel.propagation.placements import Replicated
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.sequence_parallel import sequence_choices
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import CallSpan
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import Point
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import (
    SequenceTrace,
)


class ChangingWalk(propagation_walk.Walk):
    """A pass that asks for changes of what was decided before it.

    Args:
        facts: See `Walk`.
        trace: The model.
        choices: What is decided; not changed by the pass.
        keys: Keys of the calls whose sums are left sharded, if they can be.

    Attributes:
        states: See `Walk`.
        changes: Functions of `Choices` that the pass asks for.
    """

    def __init__(
        self,
        facts,
        trace: SequenceTrace,
        choices: sequence_choices.Choices,
        keys,
    ):
        super().__init__(facts, choices.replicated)
        self.changes = []
        self._trace = trace
        self._choices = choices
        self._keys_of_sums = keys
        self._span: CallSpan | None = None

    @property
    def num_ranks(self) -> int:
        """Number of parts of a sharded tensor."""
        return self._facts.num_ranks

    def _state(self, tensor):
        if (
            self._span is not None
            and id(self._span.crossing) in self._choices.partial_gradients
            and tensor.name in self._trace.parameters
        ):
            return Replicated(), frozenset()
        return super()._state(tensor)

    def is_along_sequence(self, tensor) -> bool:
        """Whether a tensor is sharded, or sized, as a sum along dim 1."""
        state, keys = self._state(tensor)
        return (
            state is not None
            and not isinstance(state, Replicated)
            and any(
                key in self._keys_of_sums or isinstance(key, Point)
                for key in keys
            )
        )

    def _cannot(self, op, error):
        """An operation cannot take its inputs as they are."""
        operand = error.operand
        if operand is not None:
            if error.dim is None and self._copy_weights(operand):
                return
            point = self._trace.points.get(operand.op.name)
            if (
                error.dim is not None
                and point is not None
                and self._choices.modes.get(point.name) is None
                and self._state(operand)[0] is None
            ):
                mode = Sharded(error.dim)
                self.changes.append(sequence_choices.set_mode(point, mode))
                return
        if not self._put_together(op.inputs):
            reason = f"{op.type} {op.name!r}: {error}"
            self.changes.append(sequence_choices.set_infeasible(reason))

    def _copy_weights(self, operand):
        """Whether a layer's own weights, or what it makes of them, do."""
        span = self._span
        if span is None or id(span.crossing) in self._choices.not_partial:
            return False
        needed = self._facts.needs_gradient
        seen, stack = set(), [operand]
        while stack:
            tensor = stack.pop()
            if tensor.name in self._trace.parameters or tensor.name in seen:
                continue
            seen.add(tensor.name)
            if tensor.name not in needed:
                continue
            if self._trace.span_of(tensor.op) is not span or (
                tensor.op.name in self._trace.points
            ):
                return False
            stack += tensor.op.inputs
        key = id(span.crossing)
        self.changes.append(sequence_choices.set_partial(key))
        return True

    def _put_together(self, tensors) -> bool:
        """Asks for whole tensors, at the nearest crossings before."""
        found = False
        for point in self._before(tensors, self.is_along_sequence):
            mode = self._choices.modes.get(point.name)
            if mode is None:
                self.changes.append(
                    sequence_choices.set_mode(point, "all_gather")
                )
            elif isinstance(mode, Sharded):
                self.changes.append(sequence_choices.set_mode(point, "never"))
            else:
                continue
            found = True
        return found

    def _misused(self, tensors):
        """What each rank uses for itself is used for something whole."""

        def is_copied(tensor):
            return isinstance(self._state(tensor)[0], Replicated)

        span = self._span
        shared = [
            point
            for point in self._before(tensors, is_copied)
            if self._choices.modes.get(point.name) == "all_gather"
        ]
        for point in shared:
            self.changes.append(sequence_choices.set_mode(point, "gather"))
        if shared:
            return
        weights = {
            id(s.crossing): s
            for s in self._trace.around(span)
            if id(s.crossing) in self._choices.partial_gradients
        }
        for tensor in tensors:
            made_in = self._trace.span_of(tensor.op)
            if (
                made_in
                and id(made_in.crossing) in self._choices.partial_gradients
            ):
                weights[id(made_in.crossing)] = made_in
        for key, found in weights.items():
            self.changes.append(sequence_choices.set_not_partial(key))
            for point in self._trace.entrances(found):
                if self.is_along_sequence(point.after):
                    self.changes.append(
                        sequence_choices.set_mode(point, "gather")
                    )
        if not self.changes:
            self.changes.append(
                sequence_choices.set_infeasible("a weight is used in two ways")
            )

    def take_whole(self, place: int) -> None:
        """Asks the layer around an operation to take what it gets whole."""
        # What is behind the first difference may be different because of it.
        for span in self._trace.around(self._trace.span_at(place)):
            points = [
                point
                for point in self._trace.entrances(span)
                if self.is_along_sequence(point.after)
            ]
            for point in points:
                self.changes.append(
                    sequence_choices.set_mode(point, "all_gather")
                )
            if points:
                return
        operations = self._trace.trace.operations
        op = operations[min(place, len(operations) - 1)]
        if not self._put_together(op.inputs):
            self.changes.append(
                sequence_choices.set_infeasible(f"{op.name!r} differs on ranks")
            )

    def _before(self, tensors, belongs):
        """The nearest points on all ways back through what `belongs`."""
        found, seen = [], set()
        queue = collections.deque(tensors)
        while queue:
            tensor = queue.popleft()
            if tensor.name in seen or not (
                belongs(tensor) or tensor.op.name in self._trace.points
            ):
                continue
            seen.add(tensor.name)
            point = self._trace.points.get(tensor.op.name)
            if point is None:
                queue += tensor.op.inputs
            elif belongs(tensor):
                found.append(point)
        return found
