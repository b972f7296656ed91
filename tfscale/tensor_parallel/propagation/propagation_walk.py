"""One pass over a traced model: what each operation does to sharded tensors.

The pass goes in the order in which operations were made. At the place of a
layer call it marks what the call leaves sharded, and it notes as failures the
keys of all sources that would have to be gathered.
"""

import collections
from collections.abc import Container
from collections.abc import Sequence

import tensorflow as tf

from tfscale import _internals
from tfscale.tensor_parallel.propagation import custom_gradients
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import operation_rules
from tfscale.tensor_parallel.propagation import shape_rules
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.placements import NoRule
from tfscale.tensor_parallel.propagation.placements import Sharded


class Walk:
    """One pass over the graph.

    Args:
        facts: What is known of the model before.
        gathered: Keys of the calls whose sources are gathered.

    Attributes:
        states: For each tensor that differs between ranks, by name, how it does
            and the keys of the sources that it depends on.
        failures: For each source that has to be gathered too, why.
        taken: Keys of the calls whose sinks arrive sharded.
    """

    def __init__(self, facts: GraphFacts, gathered: Container) -> None:
        self.states = {}
        self.failures = {}
        self.taken = set()
        self._facts = facts
        self._gathered = gathered
        self._keys_in = {}  # key of a call -> keys of its sources, and before

    def run(self, operations: list, calls: Sequence[LayerCall]) -> None:
        """Goes through the operations of a model."""
        starting = collections.defaultdict(list)
        for call in sorted(calls, key=lambda call: call.operations.stop):
            starting[call.operations.start].append(call)
        skip_to = 0
        # One place more: a call at the very end may have made no operation.
        for place in range(len(operations) + 1):
            for call in starting[place]:
                self._call(call, [operations[i] for i in call.operations])
                skip_to = max(skip_to, call.operations.stop)
            if skip_to <= place < len(operations):
                self.operation(operations[place])

    def leave(self, tensor: tf.Tensor, allowed: Sharded | None) -> None:
        """Ends at an output of the model, which may be sharded as `allowed`."""
        self._check_inside(tensor)
        state, keys = self._state(tensor)
        if state is not None and state != allowed:
            self._fail(keys, f"{tensor.name!r} leaves the model")

    def operation(self, op: tf.Operation) -> None:
        """Marks what one operation makes of sharded tensors."""
        for tensor in op.inputs:
            self._check_inside(tensor)
        states = [self._state(tensor)[0] for tensor in op.inputs]
        if not any(states):
            return
        keys = self._keys(op.inputs)
        try:
            made = self._outputs(op, states)
        except NoRule as error:
            self._fail(keys, f"{op.type} {op.name!r}: {error}")
            return
        for tensor, state in zip(op.outputs, made):
            if state is not None:
                self.states[tensor.name] = state, keys

    def _fail(self, keys, reason):
        for key in keys:
            self.failures.setdefault(key, reason)

    def _state(self, tensor):
        return self.states.get(tensor.name, (None, frozenset()))

    def _keys(self, tensors):
        return frozenset().union(*(self._state(t)[1] for t in tensors))

    def _check_inside(self, tensor):
        call = self._facts.insides.get(tensor.name)
        if call is not None:
            self._fail(
                self._keys_in[call],
                f"{tensor.name!r} from inside of layer {call!r} is used "
                "outside of it",
            )

    def _call(self, call, operations):
        sinks = [sink.tensor for sink in call.sinks]
        declared = {tensor.name for tensor in sinks}
        own = {tensor.name for op in operations for tensor in op.outputs}
        taken = [tensor for op in operations for tensor in op.inputs]
        for tensor in (*sinks, *call.inputs, *taken):
            if tensor.name not in own:
                self._check_inside(tensor)
            if tensor.name not in declared | own:
                self._fail(
                    self._keys([tensor]),
                    f"layer {call.key!r} takes {tensor.name!r} whole",
                )
        keys = self._keys(sinks)
        states = [self._state(tensor)[0] for tensor in sinks]
        if keys and states == [Sharded(sink.dim) for sink in call.sinks]:
            self.taken.add(call.key)
            for sink in call.sinks:
                if sink.propagates_to:
                    made = Sharded(sink.propagates_to.dim), keys
                    self.states[sink.propagates_to.tensor.name] = made
        else:
            self._fail(
                keys, f"layer {call.key!r} takes its input sharded otherwise"
            )
        if call.sources and call.key not in self._gathered:
            made_here = frozenset([call.key])
            for source in call.sources:
                made = Sharded(source.dim), made_here
                self.states[source.tensor.name] = made
            keys |= made_here
        self._keys_in[call.key] = keys

    def _outputs(self, op, states):
        if op.type == "IdentityN":
            made = states
        elif shape_rules.is_shape_rule(op, states):
            made = shape_rules.apply(
                op,
                states,
                num_ranks=self._facts.num_ranks,
                retraced=self._facts.retraced,
            )
        else:
            made = _matched(op, states)
        sharded = False
        for tensor, state in zip(op.outputs, made):
            if isinstance(state, Sharded):
                sharded = sharded or graph_facts.is_real(tensor)
                size = tensor.shape[state.dim]
                if size is None or size % self._facts.num_ranks:
                    raise NoRule(f"it makes {size} entries of the sharded dim")
        if sharded:
            self._check_gradients(op, states, made)
        return made

    def _check_gradients(self, op, states, made):
        for tensor, state in zip(op.inputs, states):
            if (
                state is None
                and tensor.name in self._facts.needs_gradient
                and not self._sums_gradient(tensor)
            ):
                raise NoRule(
                    f"its whole operand {tensor.name!r} would get a part of "
                    "its gradient on each rank",
                    tensor,
                )
        if _internals.GRADIENT_TYPE in op.node_def.attr:
            self._check_custom_gradient(op, states, made)

    def _sums_gradient(self, tensor):
        """Whether ranks add up what they have of a whole tensor's gradient."""
        del tensor
        return False

    def _check_custom_gradient(self, op, states, made):
        """Follows the operations of a custom gradient, as those of the model.

        The gradient of any other operation is sharded as the operation is. One
        that was written by hand could compute anything.
        """
        gradient = custom_gradients.custom_gradient(op)
        keys = self._keys(op.inputs)
        for tensor, state in zip(gradient.given, made):
            if state is not None:
                self.states[tensor.name] = state, keys
        results = [
            (tensor, state)
            for tensor, state in zip(gradient.results, states)
            if state is not None and tensor is not None
        ]
        if not all(isinstance(tensor, tf.Tensor) for tensor, _ in results):
            raise NoRule("its custom gradient is sparse")
        wanted = {tensor.op for tensor, _ in results}
        for operation in reversed(gradient.operations):
            if operation in wanted:
                wanted.update(tensor.op for tensor in operation.inputs)
        for operation in gradient.operations:
            if operation in wanted:
                self.operation(operation)
        for tensor, state in results:
            if self._state(tensor)[0] != state:
                raise NoRule("its custom gradient is not sharded as it is")


def _matched(op, states):
    """States of the outputs by the labels of the sharded dims."""
    labels = operation_rules.labels_of(op)
    names = {
        dims and dims[state.dim]
        for dims, state in zip(labels.inputs, states)
        if state
    }
    if len(names) > 1:
        raise NoRule("its operands are sharded along different dims")
    (name,) = names
    if name is None or any(name not in dims for dims in labels.outputs):
        raise NoRule("it does not treat entries of the sharded dim apart")
    for tensor, dims, state in zip(op.inputs, labels.inputs, states):
        if (
            state is None
            and dims
            and name in dims
            and tensor.shape[dims.index(name)] != 1
        ):
            raise NoRule(
                f"its operand {tensor.name!r} is whole",
                tensor,
                dims.index(name),
            )
    return [Sharded(dims.index(name)) for dims in labels.outputs]
