"""A pass over a traced model whose sums are left divided along the sequence.

It goes like that of `propagation_walk`, but where something cannot be it looks
for the nearest place before it at which a tensor enters or leaves a layer, and
proposes what to do with the tensor there. What depends on that is left alone
in this pass, so that one pass finds the changes of all layers.
"""

import collections

import tensorflow as tf

from tfscale.tensor_parallel import propagation_walk
from tfscale.tensor_parallel import sequence_choices
from tfscale.tensor_parallel.division import Copied
from tfscale.tensor_parallel.division import Divided
from tfscale.tensor_parallel.division import NoRule
from tfscale.tensor_parallel.sequence_trace import Point
from tfscale.tensor_parallel.sequence_trace import SequenceTrace

_NO_GRADIENT = ("OnesLike", "StopGradient", "ZerosLike")


class SequenceWalk(propagation_walk.Walk):
    """One pass.

    Args:
        facts: See `Walk`.
        trace: The model.
        choices: What is decided; not changed by the pass.
        keys: Keys of the calls whose sums are left divided, if they can be.

    Attributes:
        states: See `Walk`.
        effective: Points at which something is done, with the dim.
        changes: Functions of `Choices` that the pass asks for.
    """

    def __init__(
        self,
        facts,
        trace: SequenceTrace,
        choices: sequence_choices.Choices,
        keys,
    ):
        super().__init__(facts, choices.whole)
        self.effective = {}
        self.changes = []
        self._trace = trace
        self._choices = choices
        self._keys_of_sums = keys
        self._lost = set()  # names of tensors that nothing is known of
        self._span = None
        self._depth = 0

    @property
    def num_ranks(self) -> int:
        """Number of parts of a divided tensor."""
        return self._facts.num_ranks

    # How tensors are seen.

    def _state(self, tensor):
        if (
            self._span is not None
            and id(self._span.crossing) in self._choices.copies
            and tensor.name in self._trace.parameters
        ):
            return Copied(), frozenset()
        return super()._state(tensor)

    def is_along_sequence(self, tensor) -> bool:
        """Whether a tensor is divided, or sized, as a sum along dim 1."""
        state, keys = self._state(tensor)
        return (
            state is not None
            and not isinstance(state, Copied)
            and any(
                key in self._keys_of_sums or isinstance(key, Point)
                for key in keys
            )
        )

    # The pass.

    def operation(self, op: tf.Operation) -> None:
        """Marks what one operation makes of divided tensors."""
        if self._depth == 0:
            self._span = self._trace.span_of(op)
        point = self._trace.points.get(op.name)
        if any(tensor.name in self._lost for tensor in op.inputs):
            self._lose(op.outputs)
        elif point is not None:
            self._cross(point)
        else:
            self._compute(op)

    def _compute(self, op):
        for tensor in op.inputs:
            self._check_inside(tensor)
        found = [self._state(tensor)[0] for tensor in op.inputs]
        states = [None if isinstance(s, Copied) else s for s in found]
        if not any(states):
            if any(found):
                self._repeat(op, found)
            return
        keys = self._keys(op.inputs)
        self._depth += 1
        try:
            made = self._outputs(op, states)
        except NoRule as error:
            if self._depth == 1:
                self._cannot(op, error)
            self._lose(op.outputs)
            return
        finally:
            self._depth -= 1
        for tensor, state in zip(op.outputs, made):
            if state is not None:
                self.states[tensor.name] = state, keys

    def _repeat(self, op, found):
        """What all ranks do alike with something that each uses for itself."""
        needed = self._facts.needs_gradient
        for tensor, state in zip(op.inputs, found):
            if state is None and tensor.name in needed:
                self._misused(op.inputs)
                self._lose(op.outputs)
                return
        if op.type in _NO_GRADIENT:
            return
        keys = self._keys(op.inputs)
        for tensor in op.outputs:
            if tensor.name in needed:
                self.states[tensor.name] = Copied(), keys

    def _check_gradients(self, op, states, made):
        for tensor, state in zip(op.inputs, states):
            if (
                state is None
                and tensor.name in self._facts.needs_gradient
                and not isinstance(self._state(tensor)[0], Copied)
            ):
                raise NoRule(
                    f"its whole operand {tensor.name!r} would get a part of "
                    "its gradient on each rank",
                    tensor,
                )
        if "_gradient_op_type" in op.node_def.attr:
            self._check_custom_gradient(op, states, made)

    def _cross(self, point: Point):
        """Where a tensor enters or leaves a layer."""
        before, after = point.before, point.after
        self._check_inside(before)
        state, keys = self._state(before)
        mode = self._choices.modes.get(point.name)
        if isinstance(state, Divided) and self.is_along_sequence(before):
            if mode in ("share", "gather"):
                self.effective[point] = state.dim
                if mode == "share":
                    made = Copied(direct=True), frozenset([point])
                    self.states[after.name] = made
                return
            self.states[after.name] = state, keys
        elif state is None and isinstance(mode, Divided):
            self.effective[point] = mode.dim
            self.states[after.name] = mode, frozenset([point])
        elif isinstance(state, Copied) and not state.direct:
            # Weights, or what was made from them, leave their layer.
            self._misused([before])
            self._lose([after])
        elif state is not None:
            self.states[after.name] = state, keys

    def leave(self, tensor: tf.Tensor, allowed) -> None:
        """Ends at an output of the model."""
        state, _ = self._state(tensor)
        if isinstance(state, Copied):
            self._misused([tensor])
        elif self.is_along_sequence(tensor):
            self._put_together([tensor])
        elif tensor.name not in self._lost:
            super().leave(tensor, allowed)

    def _call(self, call, operations):
        self._span = None
        own = {tensor.name for op in operations for tensor in op.outputs}
        taken = [tensor for op in operations for tensor in op.inputs]
        sinks = [sink.tensor for sink in call.sinks]
        taken = [
            tensor
            for tensor in (*sinks, *call.inputs, *taken)
            if tensor.name not in own
        ]
        made = [*call.sources, *(s.passes for s in call.sinks if s.passes)]
        can_run = not any(tensor.name in self._lost for tensor in taken)
        for tensor in taken:
            state, _ = self._state(tensor)
            if isinstance(state, Copied):
                shares = call.key in self._trace.takes_shared
                if not (state.direct and shares):
                    self._misused([tensor])
                    can_run = False
            elif self.is_along_sequence(tensor):
                self._put_together([tensor])
                can_run = False
        if can_run:
            super()._call(call, operations)
        else:
            self._lose([part.tensor for part in made])
            self._lose(call.outputs)

    def _lose(self, tensors):
        self._lost.update(tensor.name for tensor in tensors)

    def _fail(self, keys, reason):
        # Neither the sums' doing, nor to be helped at a crossing.
        if self._depth == 0 and not all(isinstance(k, Point) for k in keys):
            self.changes.append(sequence_choices.set_hopeless(reason))

    # What to change.

    def _cannot(self, op, error):
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
                mode = Divided(error.dim)
                self.changes.append(sequence_choices.set_mode(point, mode))
                return
        if not self._put_together(op.inputs):
            reason = f"{op.type} {op.name!r}: {error}"
            self.changes.append(sequence_choices.set_hopeless(reason))

    def _copy_weights(self, operand):
        """Whether a layer's own weights, or what it makes of them, do."""
        span = self._span
        if span is None or id(span.crossing) in self._choices.not_copies:
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
        self.changes.append(sequence_choices.set_copies(key))
        return True

    def _put_together(self, tensors) -> bool:
        """Asks for whole tensors, at the nearest crossings before."""
        found = False
        for point in self._before(tensors, self.is_along_sequence):
            mode = self._choices.modes.get(point.name)
            if mode is None:
                self.changes.append(sequence_choices.set_mode(point, "share"))
            elif isinstance(mode, Divided):
                self.changes.append(sequence_choices.set_mode(point, "never"))
            else:
                continue
            found = True
        return found

    def _misused(self, tensors):
        """What each rank uses for itself is used for something whole."""

        def is_copied(tensor):
            return isinstance(self._state(tensor)[0], Copied)

        span = self._span
        shared = [
            point
            for point in self._before(tensors, is_copied)
            if self._choices.modes.get(point.name) == "share"
        ]
        for point in shared:
            self.changes.append(sequence_choices.set_mode(point, "gather"))
        if shared:
            return
        weights = {
            id(s.crossing): s
            for s in self._trace.around(span)
            if id(s.crossing) in self._choices.copies
        }
        for tensor in tensors:
            made_in = self._trace.span_of(tensor.op)
            if made_in and id(made_in.crossing) in self._choices.copies:
                weights[id(made_in.crossing)] = made_in
        for key, found in weights.items():
            self.changes.append(sequence_choices.set_not_copies(key))
            for point in self._trace.entrances(found):
                if self.is_along_sequence(point.after):
                    self.changes.append(
                        sequence_choices.set_mode(point, "gather")
                    )
        if not self.changes:
            self.changes.append(
                sequence_choices.set_hopeless("a weight is used in two ways")
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
                self.changes.append(sequence_choices.set_mode(point, "share"))
            if points:
                return
        operations = self._trace.trace.operations
        op = operations[min(place, len(operations) - 1)]
        if not self._put_together(op.inputs):
            self.changes.append(
                sequence_choices.set_hopeless(f"{op.name!r} differs on ranks")
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
