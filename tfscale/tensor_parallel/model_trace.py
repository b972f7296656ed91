"""Traces a model, whole or as a rank does, and records the calls of its layers.

The graph is thrown away. In the trace of a whole model there is an Identity
where a tensor enters or leaves a layer; in that of a rank, its conversion.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.context import step_context
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.propagation.graph_facts import Edge
from tfscale.tensor_parallel.propagation.graph_facts import Span
from tfscale.tensor_parallel.sequence_parallel import sequence


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call of a layer with a rule: its first argument, and answers of it."""

    rule: Any
    operations: range
    inputs: Any
    outputs: Any
    divides: bool
    scatters: bool | None


class Recorder:
    """Records the calls of layers while a model is traced.

    `num_shards` is 1 for whole tensors, and the number of ranks for tensors of
    the shapes that a rank has. `calls` are the outermost ones of layers with
    rules; `spans` are calls of layers with boundaries, in the order in which
    they begin, and `edges` where tensors enter and leave them.
    """

    def __init__(self, num_shards: int = 1):
        self.calls: list[RecordedCall] = []
        self.edges: list[Edge] = []
        self.spans: list[Span] = []
        self.num_shards = num_shards
        self.is_inside = False
        self._span: Span | None = None

    def run_with_edges(self, boundary, method: Callable, args, kwargs):
        """Calls a method of a layer with a boundary around it."""
        if self.is_inside:
            return method(*args, **kwargs)
        before = self._span
        self._span = span = Span(boundary, before)
        self.spans.append(span)
        start = num_operations()

        def convert(position, tensor):
            return self._convert(boundary, position, tensor)

        try:
            args, kwargs = sequence.map_inputs(convert, args, kwargs)
            outputs = method(*args, **kwargs)
            return sequence.map_outputs(convert, outputs)
        finally:
            span.operations = range(start, num_operations())
            self._span = before

    def _convert(self, boundary, position, tensor):
        start, plan = num_operations(), sequence.current()
        conversion = plan and plan.conversions.get((id(boundary), position))
        mode = None
        if conversion and conversion.fits(tensor, self.num_shards):
            mode = conversion.mode
        if mode is None:
            after = tf.identity(tensor)
        elif mode == "scatter":
            after = tf.split(tensor, self.num_shards, conversion.dim)[0]
        else:
            after = tf.concat([tensor] * self.num_shards, conversion.dim)
        operations = range(start, num_operations())
        self.edges.append(
            Edge(boundary, position, operations, tensor, after, mode)
        )
        return sequence.with_mask(after, tensor)


def num_operations() -> int:
    """The number of operations in the graph so far."""
    return len(tf.compat.v1.get_default_graph().get_operations())


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A traced model.

    `inputs` are those that could have a gradient. `outputs` are flat, with
    their masks and the losses that layers have added, which are whole too; they
    end where Python failed on a rank's shapes. `nums_of_calls` says how many
    `calls` there are after each mode, `differentiable` are placeholders of
    trainable variables, `generators` of the states of generators, by id.
    """

    graph: tf.Graph
    recorder: Recorder
    inputs: list
    outputs: list
    nums_of_calls: list
    differentiable: list
    generators: dict

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls of layers with rules."""
        return self.recorder.calls

    def generators_named(self, names) -> frozenset[int]:
        """Ids of the states whose placeholders have these names."""
        return frozenset(
            state for state, x in self.generators.items() if x.name in names
        )

    def as_trace(self, whole_rules):
        """For propagation; `whole_rules` neither give nor pass on shards."""
        calls = [
            layer_call(key, call, call.rule not in whole_rules)
            for key, call in enumerate(self.calls)
        ]
        return layer_calls.Trace(self.graph, calls, self.outputs)


# Packages whose layers do in inference no more than in training.
_KNOWN = ("keras", "keras_hub", "tfscale")


def modes_of(model: keras.Model) -> tuple[bool, ...]:
    """Values of `training` for which a model may compute something else."""
    kinds = {layer.__class__ for layer in attributes.flatten_layers(model)}
    may_differ = any(
        kind.__module__.partition(".")[0] not in _KNOWN
        and "training" in inspect.signature(kind.call).parameters
        for kind in kinds
    )
    return (True, False) if may_differ else (True,)


def trace_model(model, num_shards=1, inputs=None, modes=(True,)) -> TracedModel:
    """Traces a model with the shapes that a rank has, or whole ones.

    `num_shards` is that of `Recorder`. `inputs` are `tf.TensorSpec`s; None for
    the model's own. The model is called once for each value of `training` in
    `modes`.
    """
    made, records = {}, Recorder(num_shards)

    def run():
        # In a separate graph, also within a replica.
        graph = tf.compat.v1.get_default_graph()
        with step_context.within_ranks(
            replica=None, recorder=records, graph=graph
        ):
            made.update(_call(model, records, inputs, modes))

    graph = tf.compat.v1.wrap_function(run, []).graph
    return TracedModel(graph, records, **made)


def _call(model, records, inputs, modes):
    variables = model.variables
    values = [
        tf.compat.v1.placeholder(v.dtype, v.shape, name="variable")
        for v in variables
    ]
    inputs = keras.tree.map_structure(
        lambda x: tf.compat.v1.placeholder(x.dtype, x.shape),
        attributes.inputs_structure(model) if inputs is None else inputs,
    )
    outputs, nums_of_calls = [], []
    try:
        for training in modes:
            with keras.StatelessScope(
                state_mapping=list(zip(variables, values)), collect_losses=True
            ) as scope:
                flat = keras.tree.flatten(model(inputs, training=training))
            masks = [symbols.get_keras_mask(x) for x in flat]
            outputs += flat + [x for x in masks if x is not None]
            outputs += scope.losses
            nums_of_calls.append(len(records.calls))
    except Exception:
        # Python may fail on a rank's shapes, but not on whole ones. Inference
        # fails when it is asked for.
        if records.num_shards == 1 and training is modes[0]:
            raise
    trainable = {id(v) for v in model.trainable_variables}
    seeds = {id(g.state) for g in rank_seeds.generators(model)}
    return {
        "inputs": list(filter(graph_facts.is_real, keras.tree.flatten(inputs))),
        "outputs": outputs,
        "nums_of_calls": nums_of_calls,
        "differentiable": [
            x for v, x in zip(variables, values) if id(v) in trainable
        ],
        "generators": {
            id(v): x for v, x in zip(variables, values) if id(v) in seeds
        },
    }


def layer_call(key, recorded, may_divide):
    """A recorded call, for propagation."""
    rule, inputs, outputs = recorded.rule, recorded.inputs, recorded.outputs
    source = sink = None
    # An input of unknown size is whole, see `Rule.is_sharded`.
    size = None if rule.sink_dim is None else inputs.shape[rule.sink_dim]
    if recorded.divides and may_divide and (size or not rule.propagates):
        dim = outputs.shape.rank + rule.source_dim
        source = layer_calls.Source(outputs, dim)
    if size and (source or not rule.propagates):
        dim = inputs.shape.rank + rule.sink_dim
        passed = source if rule.propagates else None
        sink = layer_calls.Sink(inputs, dim, passed)
    return layer_calls.LayerCall(
        key,
        recorded.operations,
        sources=(source,) if source and not rule.propagates else (),
        sinks=(sink,) if sink else (),
        inputs=() if sink else (inputs,),
        outputs=() if source else tuple(keras.tree.flatten(outputs)),
        shares_input=rule.shares_input,
    )
