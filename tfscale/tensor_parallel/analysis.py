"""Finds what a model's layers may leave divided for the layers after them.

The model is traced once, whole and on one device, into a graph that is thrown
away; in it propagation.py follows the outputs of column-parallel layers.
"""

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfscale.tensor_parallel import decisions
from tfscale.tensor_parallel import draws
from tfscale.tensor_parallel import layer_calls
from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import pairing
from tfscale.tensor_parallel import propagation
from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel import sharded_call


def decide(num_ranks: int, rule) -> None:
    """Sets a rule as the model that is being called has it.

    Args:
        num_ranks: Number of model ranks.
        rule: That of a layer about to run.
    """
    if rule.is_part:
        return
    model = decisions.model_in_call()
    if model is None:
        rule.reset()
        rule.layer._sharded_call.is_decided = True
        return
    decision = decisions.decision_of(model)
    if decision is None or rule not in decision.keeps:
        # A call, of which the one that goes on is to know nothing.
        with layer_losses.kept():
            analyse(model, num_ranks)
        decision = decisions.decision_of(model)
    rule.keeps = decision.keeps.setdefault(rule, rule.keeps)


def settle(model, num_ranks: int) -> None:
    """Sets all rules as a functional model has them, analysed if need be."""
    decision = decisions.decision_of(model)
    rules = [call.rule for call in sharded_calls(model)]
    if decision is None or not set(rules) - {None} <= set(decision.keeps):
        analyse(model, num_ranks)
    else:
        decision.apply()


def analyse(model, num_ranks: int) -> dict:
    """Decides for all layers of a model what stays divided.

    Args:
        model: A functional or sequential model with sharded variables.
        num_ranks: Number of model ranks.

    Returns:
        Why outputs are put together at once, by layer.

    Warns:
        UserWarning: If layers are divided without a partner.
    """
    for call in sharded_calls(model):
        if call.rule is not None:
            call.rule.reset()
    # A thread of its own has none of what surrounds the call: scopes of Keras,
    # tapes, graphs and strategies of TensorFlow.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        rules, reasons, complaint, drawing = executor.submit(
            _analyse, model, num_ranks
        ).result()
    for generator in draws.generators(model):
        draws.attach(
            generator, functools.partial(_draws_parts, generator, num_ranks)
        )
    for call in sharded_calls(model):
        call.is_decided = True
        if call.rule is not None:
            rules.add(call.rule)
    keeps = {rule: rule.keeps for rule in rules}
    decision = decisions.Decision(keeps, reasons, frozenset(drawing))
    decision.apply()
    decisions.note(model, decision)
    if complaint:
        warnings.warn(complaint, stacklevel=2)
    return {rule.layer: reason for rule, reason in reasons.items()}


def _draws_parts(generator, num_ranks):
    model = decisions.model_in_call()
    if model is None:
        return False
    if decisions.decision_of(model) is None:
        with layer_losses.kept():
            analyse(model, num_ranks)
    return id(generator.state) in decisions.decision_of(model).drawing


def sharded_calls(model) -> Iterator[sharded_call.ShardedCall]:
    """Of all layers of a model that have sharded variables."""
    for layer in model._flatten_layers():
        if hasattr(layer, "_sharded_call"):
            yield layer._sharded_call


@dataclasses.dataclass(frozen=True)
class _Traced:
    graph: tf.Graph
    calls: list
    outputs: list
    differentiable: list
    generators: dict
    losses: list

    def as_trace(self, whole_rules):
        """For propagation; `whole_rules` neither give nor pass on parts."""
        calls = [
            layer_call(key, call, call.rule not in whole_rules)
            for key, call in enumerate(self.calls)
        ]
        return layer_calls.Trace(self.graph, calls, self.outputs)


def _analyse(model, num_ranks):
    whole, reasons = trace_model(model), {}
    while True:
        trace = whole.as_trace(reasons)
        found = propagation.propagate(
            trace,
            num_ranks=num_ranks,
            differentiable=whole.differentiable,
            generators=whole.generators.values(),
            retraced=True,
        )
        problems = found.gathered
        for key, call in enumerate(whole.calls):
            why = found.gathered.get(key) or reasons.get(call.rule)
            call.rule.decide(key in found.divided, why)
        if not problems:
            # What ranks will do: are those the same operations?
            local = trace_model(model, num_ranks).as_trace(reasons)
            problems = retrace.differences(
                trace, local, found, num_ranks=num_ranks
            )
        if not problems:
            calls = [
                (call.rule, key in found.sink_divided)
                for key, call in enumerate(whole.calls)
            ]
            drawing = {
                state
                for state, tensor in whole.generators.items()
                if tensor.name in found.draws_of_parts
            }
            rules = {call.rule for call in whole.calls}
            complaint = pairing.complaint(calls, reasons)
            return rules, reasons, complaint, drawing
        # A layer that is called several times does the same in all calls.
        for key, reason in problems.items():
            reasons.setdefault(whole.calls[key].rule, reason)


def trace_model(model, num_parts=1, inputs=None):
    """Traces a model with the shapes that a rank has, or whole ones.

    Args:
        model: A functional or sequential model.
        num_parts: See `sharded_call.recording`.
        inputs: `tf.TensorSpec`s of its inputs; its own, if None.

    Returns:
        The graph and what was noted in it.
    """
    made = {}

    def run():
        made.update(_call(model, num_parts, inputs))

    graph = tf.compat.v1.wrap_function(run, []).graph
    return _Traced(graph, **made)


def _call(model, num_parts, inputs):
    """Calls the model on placeholders, like some inputs or else its own."""
    variables = model.variables
    values = [
        tf.compat.v1.placeholder(v.dtype, v.shape, name="variable")
        for v in variables
    ]
    inputs = keras.tree.map_structure(
        lambda x: tf.compat.v1.placeholder(x.dtype, x.shape),
        getattr(model, "_inputs_struct", model.inputs[0])
        if inputs is None
        else inputs,
    )
    outputs = []
    with (
        keras.StatelessScope(
            state_mapping=list(zip(variables, values)), collect_losses=True
        ) as scope,
        sharded_call.recording(num_parts) as calls,
    ):
        try:
            outputs = keras.tree.flatten(model(inputs, training=True))
        except Exception:
            # Python that fails on a rank's shapes; the whole has to work.
            if num_parts == 1:
                raise
    trainable = {id(v) for v in model.trainable_variables}
    seeds = {id(g.state) for g in draws.generators(model)}
    return {
        "calls": calls,
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
    if rule.sink_dim is not None and (source or not rule.passes):
        dim = inputs.shape.rank + rule.sink_dim
        passed = source if rule.passes else None
        sink = layer_calls.Sink(inputs, dim, passed)
    return layer_calls.LayerCall(
        key,
        recorded.operations,
        sources=(source,) if source and not rule.passes else (),
        sinks=(sink,) if sink else (),
        inputs=() if sink else (inputs,),
        outputs=() if source else tuple(keras.tree.flatten(outputs)),
    )
