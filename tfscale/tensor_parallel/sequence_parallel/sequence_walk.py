"""A pass over a traced model whose sums are left sharded along the sequence.

It goes like that of `propagation_walk`, but where something cannot be it
proposes a change. What depends on that is left alone in this pass, so that one
pass finds the changes of all layers.
"""

import tensorflow as tf

from tfscale.tensor_parallel.propagation.placements import NoRule
from tfscale.tensor_parallel.propagation.placements import Replicated
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.sequence_parallel import sequence_choices
from tfscale.tensor_parallel.sequence_parallel.sequence_changes import (
    ChangingWalk,
)
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import Point

_NO_GRADIENT = ("OnesLike", "StopGradient", "ZerosLike")


class SequenceWalk(ChangingWalk):
    """One pass.

    Args:
        *args: See `ChangingWalk`.

    Attributes:
        effective: Points at which something is done, with the dim.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.effective = {}
        self._lost = set()  # names of tensors that nothing is known of
        self._depth = 0

    def operation(self, op: tf.Operation) -> None:
        """Marks what one operation makes of sharded tensors."""
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
        states = [None if isinstance(s, Replicated) else s for s in found]
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
                self.states[tensor.name] = Replicated(), keys

    def _sums_gradient(self, tensor):
        return isinstance(self._state(tensor)[0], Replicated)

    def _cross(self, point: Point):
        """Where a tensor enters or leaves a layer."""
        before, after = point.before, point.after
        self._check_inside(before)
        state, keys = self._state(before)
        mode = self._choices.modes.get(point.name)
        if isinstance(state, Sharded) and self.is_along_sequence(before):
            if mode in ("all_gather", "gather"):
                self.effective[point] = state.dim
                if mode == "all_gather":
                    made = Replicated(direct=True), frozenset([point])
                    self.states[after.name] = made
                return
            self.states[after.name] = state, keys
        elif state is None and isinstance(mode, Sharded):
            self.effective[point] = mode.dim
            self.states[after.name] = mode, frozenset([point])
        elif isinstance(state, Replicated) and not state.direct:
            # Weights, or what was made from them, leave their layer.
            self._misused([before])
            self._lose([after])
        elif state is not None:
            self.states[after.name] = state, keys

    def leave(self, tensor: tf.Tensor, allowed) -> None:
        """Ends at an output of the model."""
        state, _ = self._state(tensor)
        if isinstance(state, Replicated):
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
        made = [
            *call.sources,
            *(s.propagates_to for s in call.sinks if s.propagates_to),
        ]
        can_run = not any(tensor.name in self._lost for tensor in taken)
        for tensor in taken:
            state, _ = self._state(tensor)
            if isinstance(state, Replicated):
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
            self.changes.append(sequence_choices.set_infeasible(reason))
