"""Each call of a model as a stage by itself, to measure time and memory."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.graphs import flops
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.stages.trace_costs import UNKNOWN_LENGTH
from tfscale.pipeline.stages.trace_costs import described
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing import trace
from tfscale.pipeline.tracing.phases import Phase
from tfscale.pipeline.tracing.stage_graph import StageGraph
from tfscale.pipeline.tracing.stage_graph import TraceOptions


def map_calls(
    function: Callable[[Stage, dict[str, Phase]], Any],
    graph: Graph,
    rows: int,
    **options: bool,
) -> list:
    """`function` of the stage, and its phases, that each call would be.

    Traced for `rows` examples, with `TraceOptions`; equal calls share one
    result.
    """
    differentiable = graph.differentiable()
    known, results = {}, []
    for call in graph.calls:
        args, kwargs = described(call, graph)
        key = (
            flops.call_key(call.operation, args, kwargs),
            tuple(value in differentiable for value in call.inputs),
            tuple(variable.trainable for variable in call.variables),
        )
        if key not in known:
            stage, traced = _trace(graph, call, rows, differentiable, options)
            known[key] = function(stage, traced.phases)
        results.append(known[key])
    return results


def tensor_spec(graph: Graph, value: Value, rows: int) -> tf.TensorSpec:
    """The spec of a tensor of the model with `rows` examples.

    Raises:
        ValueError: If another size than that of the batch is unknown.
    """
    spec = graph.with_rows(value, rows)
    if None in spec.shape:
        raise ValueError(
            "Memory and time can be estimated where sizes are known. Received: "
            f"a tensor of shape {graph.specs[value].shape}, and no length "
            f"from 1 to {UNKNOWN_LENGTH} that the layers of the model work "
            "with. Give its inputs sizes: `keras.Input((77,))`."
        )
    return tf.TensorSpec(spec.shape, spec.dtype)


def _trace(graph, call, rows, differentiable, options):
    variables = tuple({id(v): v for v in call.variables}.values())
    stage = Stage(
        index=0,
        calls=(call,),
        inputs=tuple(dict.fromkeys(call.inputs)),
        outputs=call.outputs,
        variables=variables,
    )
    stage_graph = StageGraph(
        stage,
        {id(v): number for number, v in enumerate(variables)},
        {
            keys.Activation(value): tensor_spec(graph, value, rows)
            for value in stage.inputs
        },
        differentiable,
        None,
        # Calls without trainable layers before them have no backward.
        TraceOptions(training=call.outputs[0] in differentiable, **options),
    )
    with tf.init_scope():
        return stage, trace.trace_stage(stage_graph)
