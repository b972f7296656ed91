"""Traces a model, whole or as a rank does, and notes the calls of its layers.

The graph is thrown away; it is there to be looked at.
"""

import dataclasses

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale import rank_context
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.recorder import RecordedCall
from tfscale.tensor_parallel.recorder import Recorder
from tfscale.tensor_parallel.recorder import recording


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A traced model, and what was noted on the way.

    Attributes:
        graph: Its graph.
        recorder: What was noted of its layers.
        outputs: Its outputs, flat; none if Python failed on a rank's shapes.
        differentiable: What stands for its trainable variables.
        generators: What stands for the states of its generators of random
            numbers, by id of the state.
        losses: What layers gave to `add_loss`.
    """

    graph: tf.Graph
    recorder: Recorder
    outputs: list
    differentiable: list
    generators: dict
    losses: list

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls of layers with rules."""
        return self.recorder.calls

    def as_trace(self, whole_rules):
        """For propagation; `whole_rules` neither give nor pass on parts."""
        calls = [
            layer_call(key, call, call.rule not in whole_rules)
            for key, call in enumerate(self.calls)
        ]
        return layer_calls.Trace(self.graph, calls, self.outputs)


def trace_model(
    model, num_parts=1, inputs=None, has_edges=False
) -> TracedModel:
    """Traces a model with the shapes that a rank has, or whole ones.

    Args:
        model: A functional or sequential model.
        num_parts: See `Recorder`.
        inputs: `tf.TensorSpec`s of its inputs; its own, if None.
        has_edges: See `Recorder`.
    """
    made, records = {}, Recorder(num_parts, has_edges)

    def run():
        # In a graph of its own, whoever asks for it.
        with rank_context.within(replica=None), recording(records):
            made.update(_call(model, num_parts, inputs))

    graph = tf.compat.v1.wrap_function(run, []).graph
    return TracedModel(graph, records, **made)


def _call(model, num_parts, inputs):
    """Calls the model on placeholders, like some inputs or else its own."""
    variables = model.variables
    values = [
        tf.compat.v1.placeholder(v.dtype, v.shape, name="variable")
        for v in variables
    ]
    inputs = keras.tree.map_structure(
        lambda x: tf.compat.v1.placeholder(x.dtype, x.shape),
        _internals.inputs_structure(model) if inputs is None else inputs,
    )
    outputs = []
    with keras.StatelessScope(
        state_mapping=list(zip(variables, values)), collect_losses=True
    ) as scope:
        try:
            outputs = keras.tree.flatten(model(inputs, training=True))
        except Exception:
            # Python that fails on a rank's shapes; the whole has to work.
            if num_parts == 1:
                raise
    trainable = {id(v) for v in model.trainable_variables}
    seeds = {id(g.state) for g in rank_seeds.generators(model)}
    return {
        "outputs": outputs,
        "differentiable": [
            x for v, x in zip(variables, values) if id(v) in trainable
        ],
        # What layers have noted down on the way.
        "losses": list(scope.losses),
        "generators": {
            id(v): x for v, x in zip(variables, values) if id(v) in seeds
        },
    }


def layer_call(key, recorded, may_divide):
    """What propagation is to know of a call."""
    rule, inputs, outputs = recorded.rule, recorded.inputs, recorded.outputs
    source = sink = None
    if recorded.divides and may_divide:
        dim = outputs.shape.rank + rule.source_dim
        source = layer_calls.Source(outputs, dim)
    if rule.sink_dim is not None and (source or not rule.propagates):
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
