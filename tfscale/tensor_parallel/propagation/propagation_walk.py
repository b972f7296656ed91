"""One pass over a traced model: what each operation does to sharded tensors.

The pass follows the order in which operations were created. Where an operation
cannot take its inputs as they are, the pass requests another choice at the
nearest edge before it:

    edge                       choices, each later one for good
    output of a layer call     sharded, gathered (the reason why)
    `Edge`, into or out of     as it comes, `Sharded`, "never", "all_gather",
    a layer                    "gather"
    `Boundary`, its weights    whole, "partial" (used on parts, the gradients
                               are added up), "whole"

The output of a row-parallel layer is `Partial`, as DTensor and GSPMD call it:
sharded it is reduce-scattered, gathered it is all-reduced.

Operations that depend on one that fails are skipped in this pass. After a call
of a layer the pass continues with the declared outputs, so that one pass finds
the changes of all layers.
"""

import collections
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import walks
from tfscale.tensor_parallel.propagation import custom_gradients
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import operation_rules
from tfscale.tensor_parallel.propagation.graph_facts import Edge
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.labels import Infeasible
from tfscale.tensor_parallel.propagation.labels import NoRule
from tfscale.tensor_parallel.propagation.labels import Replicated
from tfscale.tensor_parallel.propagation.labels import Sharded
from tfscale.tensor_parallel.propagation.labels import Sizes
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall


class Walk:
    """One pass over the graph; `choices` at edges are not changed by it."""

    def __init__(self, facts: GraphFacts, choices: Mapping) -> None:
        # By name of a tensor that differs between ranks: how it does, and the
        # nearest edges before it.
        self.states: dict[str, tuple] = {}
        # The choices that the pass requests, by edge.
        self.changes: dict[Hashable, Any] = {}
        # Keys of the calls whose sinks arrive sharded.
        self.sharded_sinks: set[Hashable] = set()
        # The dim along which a tensor is converted.
        self.converted: dict[Edge, int] = {}
        self._facts = facts
        self._choices = choices
        self._lost: set[str] = set()  # tensors with an unknown state
        self._keys_in: dict[Hashable, frozenset] = {}
        self._span = None

    def run(self, operations: list, calls: Sequence[LayerCall]) -> None:
        """Goes through the operations of a model."""
        starting = collections.defaultdict(list)
        for call in sorted(calls, key=lambda call: call.operations.stop):
            starting[call.operations.start].append(call)
        skip_to = 0
        # One more index: a call at the very end may have no operation.
        for index in range(len(operations) + 1):
            for call in starting[index]:
                self._call(call, [operations[i] for i in call.operations])
                skip_to = max(skip_to, call.operations.stop)
            if skip_to <= index < len(operations):
                self._operation(operations[index])

    def check_output(self, tensor: tf.Tensor) -> None:
        """Requests that an output of the model is whole."""
        self._check_inside(tensor)
        state, edges = self._state(tensor)
        if isinstance(state, Replicated):
            self._misused([tensor])
        elif state is not None:
            self.gather(edges, f"{tensor.name!r} leaves the model")

    def may_be_gathered(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is sharded, or a size, by choices of this search."""
        state, edges = self._state(tensor)
        return isinstance(state, Sharded | Sizes) and not (
            edges <= self._facts.fixed
        )

    def gather(self, edges: Iterable[Hashable], reason: str) -> None:
        """Requests whole tensors at edges."""
        edges, found = frozenset(edges), False
        for edge in edges - self._facts.fixed:
            choice = self._choices.get(edge)
            if not isinstance(edge, Edge):
                self.changes.setdefault(edge, reason)
            elif choice is None:
                self.changes[edge] = "all_gather"
            elif isinstance(choice, Sharded):
                self.changes[edge] = "never"
            else:
                continue
            found = True
        if edges and not found:
            raise Infeasible(reason)

    def _operation(self, op):
        self._span = self._facts.span_of(op)
        edge = self._facts.edges.get(op.name)
        for tensor in op.inputs:
            self._check_inside(tensor)
        if any(tensor.name in self._lost for tensor in op.inputs):
            self._lose(op.outputs)
        elif edge is not None:
            self._cross(edge)
        else:
            try:
                self._compute(op)
            except NoRule as error:
                if self._use_weights_on_shards(error.operand, error.made):
                    self._set(op, error.made)
                else:
                    self._cannot(op, error)
                    self._lose(op.outputs)

    def _cross(self, edge):
        """The state of a tensor that enters or leaves a layer."""
        state, edges = self._state(edge.before)
        choice = self._choices.get(edge)
        if isinstance(state, Sharded) and not edges <= self._facts.fixed:
            edges = frozenset([edge])
            if choice in ("all_gather", "gather"):
                self.converted[edge] = state.dim
                state = Replicated(True) if choice == "all_gather" else None
        elif state is None and isinstance(choice, Sharded):
            self.converted[edge] = choice.dim
            state, edges = choice, frozenset([edge])
        elif isinstance(state, Replicated) and not state.direct:
            # Weights, or tensors computed from them, leave their layer.
            self._misused([edge.before])
            self._lose([edge.after])
            return
        if state is not None:
            self.states[edge.after.name] = state, edges

    def _compute(self, op):
        found = [self._state(tensor)[0] for tensor in op.inputs]
        states = [None if isinstance(s, Replicated) else s for s in found]
        if any(states):
            made = self._outputs(op, states)
        elif any(found):
            made = self._repeated(op, found)
        else:
            return
        self._set(op, made)

    def _set(self, op, made):
        edges = self._edges(op.inputs)
        for tensor, state in zip(op.outputs, made):
            if state is not None:
                self.states[tensor.name] = state, edges

    def _repeated(self, op, found):
        needed = self._facts.needs_gradient
        for tensor, state in zip(op.inputs, found):
            if state is None and tensor.name in needed:
                self._misused(op.inputs)
                self._lose(op.outputs)
                return []
        return [
            Replicated() if tensor.name in needed else None
            for tensor in op.outputs
        ]

    def _cannot(self, op, error):
        operand = error.operand
        if error.dim is not None:
            edge = self._facts.edges.get(operand.op.name)
            if (
                edge is not None
                and self._choices.get(edge) is None
                and self._state(operand)[0] is None
            ):
                self.changes[edge] = Sharded(error.dim)
                return
        self.gather(self._edges(op.inputs), f"{op.type} {op.name!r}: {error}")

    def _use_weights_on_shards(self, operand, made):
        """Whether a tensor is a weight of the layer, or made from weights."""
        span = self._span
        if (
            not made
            or span is None
            or self._choices.get(span.boundary) is not None
        ):
            return False
        parameters = self._facts.parameters
        seen, stack = set(), [operand]
        while stack:
            tensor = stack.pop()
            if tensor.name in parameters or tensor.name in seen:
                continue
            seen.add(tensor.name)
            if tensor.name not in self._facts.needs_gradient:
                continue
            if self._facts.span_of(tensor.op) is not span or (
                tensor.op.name in self._facts.edges
            ):
                return False
            stack += tensor.op.inputs
        self.changes.setdefault(span.boundary, "partial")
        return True

    def _misused(self, tensors):
        """Handles a tensor for one rank's use that is used as a whole one."""
        copied = [
            tensor
            for tensor in tensors
            if isinstance(self._state(tensor)[0], Replicated)
        ]
        gathered = [
            edge
            for edge in self._edges(copied)
            if self._choices.get(edge) == "all_gather"
        ]
        self.changes.update(dict.fromkeys(gathered, "gather"))
        if gathered:
            return
        spans = [self._facts.span_of(tensor.op) for tensor in tensors]
        for span in (*spans, *graph_facts.outwards(self._span)):
            if span and self._choices.get(span.boundary) == "partial":
                self.changes[span.boundary] = "whole"
                for edge in self._facts.inputs_of(span):
                    if self.may_be_gathered(edge.after):
                        self.changes[edge] = "gather"
        if not self.changes:
            raise Infeasible("a weight is used in two ways")

    def _lose(self, tensors):
        self._lost.update(tensor.name for tensor in tensors)

    def _state(self, tensor):
        if (
            self._span is not None
            and self._choices.get(self._span.boundary) == "partial"
            and tensor.name in self._facts.parameters
        ):
            return Replicated(), frozenset()
        return self.states.get(tensor.name, (None, frozenset()))

    def _edges(self, tensors):
        return frozenset().union(*(self._state(t)[1] for t in tensors))

    def _check_inside(self, tensor):
        call = self._facts.internal_tensors.get(tensor.name)
        if call is not None:
            self.gather(
                self._keys_in[call],
                f"{tensor.name!r} from inside of layer {call!r} is used "
                "outside of it",
            )

    def _call(self, call, operations):
        self._span = None
        sinks = [sink.tensor for sink in call.sinks]
        declared = {tensor.name for tensor in sinks}
        internal = {tensor.name for op in operations for tensor in op.outputs}
        inputs_of_operations = [
            tensor for op in operations for tensor in op.inputs
        ]
        for tensor in (*sinks, *call.inputs, *inputs_of_operations):
            if tensor.name in internal:
                continue
            self._check_inside(tensor)
            state, edges = self._state(tensor)
            if isinstance(state, Replicated):
                if not (state.direct and call.shares_input):
                    self._misused([tensor])
            elif tensor.name not in declared:
                self.gather(
                    edges, f"layer {call.key!r} takes {tensor.name!r} whole"
                )
        states = [self._state(tensor)[0] for tensor in sinks]
        edges = self._edges(
            tensor
            for tensor, state in zip(sinks, states)
            if not isinstance(state, Replicated)
        )
        if edges and states == [Sharded(sink.dim) for sink in call.sinks]:
            self.sharded_sinks.add(call.key)
            for made in call.passed_on:
                self.states[made.tensor.name] = Sharded(made.dim), edges
        else:
            self.gather(
                edges, f"layer {call.key!r} takes its input sharded otherwise"
            )
            if any(tensor.name in self._lost for tensor in sinks):
                self._lose(made.tensor for made in call.passed_on)
        if call.sources and call.key not in self._choices:
            edge = frozenset([call.key])
            for made in call.sources:
                self.states[made.tensor.name] = Sharded(made.dim), edge
            edges |= edge
        self._keys_in[call.key] = edges

    def _outputs(self, op, states):
        made = operation_rules.apply(op, states, self._facts)
        if any(
            isinstance(state, Sharded) and graph_facts.is_real(tensor)
            for tensor, state in zip(op.outputs, made)
        ):
            self._check_gradients(op, states, made)
        return made

    def _check_gradients(self, op, states, made):
        for tensor, state in zip(op.inputs, states):
            if (
                state is None
                and tensor.name in self._facts.needs_gradient
                and not isinstance(self._state(tensor)[0], Replicated)
            ):
                raise NoRule(
                    f"its whole operand {tensor.name!r} would get a part of "
                    "its gradient on each rank",
                    tensor,
                    made=made,
                )
        if attributes.GRADIENT_TYPE in op.node_def.attr:
            self._check_custom_gradient(op, states, made)

    def _check_custom_gradient(self, op, states, made):
        """Follows the operations of a gradient that was written by hand.

        The gradient of any other operation is sharded as the operation is.
        """
        gradient = custom_gradients.custom_gradient(op)
        edges = self._edges(op.inputs)
        for tensor, state in zip(gradient.given, made):
            if state is not None:
                self.states[tensor.name] = state, edges
        results = [
            (tensor, state)
            for tensor, state in zip(gradient.results, states)
            if state is not None and tensor is not None
        ]
        if not all(isinstance(tensor, tf.Tensor) for tensor, _ in results):
            raise NoRule("its custom gradient is sparse")
        wanted = set(walks.ancestors([tensor.op for tensor, _ in results]))
        for operation in gradient.operations:
            if operation in wanted:
                self._compute_gradient(operation)
        for tensor, state in results:
            if self._state(tensor)[0] != state:
                raise NoRule("its custom gradient is not sharded as it is")

    def _compute_gradient(self, op):
        for tensor in op.inputs:
            self._check_inside(tensor)
        try:
            self._compute(op)
        except NoRule as error:
            raise NoRule(f"{op.type} {op.name!r}: {error}") from error
