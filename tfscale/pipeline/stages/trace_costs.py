"""Each call of a model, traced by itself: sizes, FLOPs, variables and phases.

One length stands for all sizes that inputs leave open: that of a sequence,
height and width of an image. Other sizes are known once calls are traced.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals.releases import called_in_model
from tfscale.graphs import flops
from tfscale.graphs.noting_scope import NotingScope
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.stages.traced_call import call_key
from tfscale.pipeline.stages.traced_call import trace_call
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing import trace
from tfscale.pipeline.tracing.phases import Phase
from tfscale.pipeline.tracing.stage_graph import StageGraph
from tfscale.pipeline.tracing.stage_graph import TraceOptions

# The size of an unknown dimension of an input that is not the batch.
UNKNOWN_LENGTH = 128


def trace_costs(graph: Graph, length: int | None = None) -> Graph:
    """The graph with its sizes, and FLOPs and variables of each call.

    Each call is traced, equal ones once.

    Unknown sizes count as `length`. By default as `UNKNOWN_LENGTH`, or as the
    `sequence_length` of a layer if that is less: position embeddings of
    keras_hub have one. They stay unknown if layers refuse that default.
    """
    if all(None not in graph.specs[v].shape[1:] for v in graph.inputs):
        return _trace_calls(graph, None)
    if length is not None:
        return _trace_calls(graph, length)
    limits = [
        getattr(layer, "sequence_length", None)
        for layer in attributes.flatten_layers(graph.functional)
    ]
    length = min([UNKNOWN_LENGTH, *(n for n in limits if isinstance(n, int))])
    try:
        return _trace_calls(graph, length)
    except Exception:  # whatever layers raise
        return _trace_calls(graph, None)


def _described(call, graph):
    """Arguments of a call for one example, with `keras.KerasTensor`s."""
    return call.filled(lambda value: graph.with_rows(value, 1))


def _trace_calls(graph, length):
    specs, multiples = dict(graph.specs), {}
    graph = dataclasses.replace(
        graph, specs=specs, multiples=multiples, length=length
    )
    for value in graph.inputs:
        specs[value] = _sized(specs[value], length)
    known, calls = {}, []
    for call in graph.calls:
        args, kwargs = _described(call, graph)
        key = call_key(call.operation, args, kwargs)
        if key not in known:
            function = trace_call(call.operation, args, kwargs)
            outputs = keras.tree.flatten(function.structured_outputs)
            known[key] = (
                flops.function_flops(function),
                [None if x is None else tuple(x.shape) for x in outputs],
            )
        number, shapes = known[key]
        calls.append(dataclasses.replace(call, flops=number))
        for value, shape in zip(call.outputs, shapes):
            if shape is None:  # a layer may return None
                continue
            if shape and shape[0] and shape[0] > 1:
                multiples[value] = shape[0]
            specs[value] = _traced(specs[value], shape)
    return dataclasses.replace(graph, calls=_with_variables(graph, calls))


def _sized(spec, length):
    if spec.shape is None or None not in spec.shape[1:]:
        return spec
    sizes = [length if size is None else size for size in spec.shape[1:]]
    return keras.KerasTensor((spec.shape[0], *sizes), spec.dtype)


def _traced(spec, shape):
    """The spec of a layer's result, whatever the layer had promised."""
    if len(shape) != len(spec.shape):
        return keras.KerasTensor(shape, spec.dtype)
    sizes = [
        promised if made is None else made
        for promised, made in zip(spec.shape, shape)
    ]
    if shape and spec.shape[0] is None:
        sizes[0] = None  # the batch
    return keras.KerasTensor(sizes, spec.dtype)


def _with_variables(graph, calls):
    """The calls; those of a shared layer with the variables that each one uses.

    The table of an embedding and an untied head that the same layer computes
    should each live where it is used.
    """
    by_operation = collections.defaultdict(list)
    for index, call in enumerate(calls):
        by_operation[id(call.operation)].append(index)
    for indices in by_operation.values():
        if len(indices) > 1 and len(calls[indices[0]].variables) > 1:
            used = [_used_variables(calls[i], graph) for i in indices]
            for index, by_this in zip(indices, used):
                without = frozenset(set().union(*used) - by_this)
                calls[index] = dataclasses.replace(
                    calls[index], without=without
                )
    return tuple(calls)


def _used_variables(call, graph):
    """Ids of the variables that a call reads, in training or without it."""
    args, kwargs = _described(call, graph)
    scope = NotingScope()
    for training in (False, True):
        operation = called_in_model(call.operation, training)
        trace_call(operation, args, kwargs, scope)
    return scope.read


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
        args, kwargs = _described(call, graph)
        key = (
            call_key(call.operation, args, kwargs),
            tuple(value in differentiable for value in call.inputs),
            tuple(variable.trainable for variable in call.variables),
        )
        if key not in known:
            made = _trace(graph, call, rows, differentiable, options)
            known[key] = function(*made)
        results.append(known[key])
    return results


def tensor_spec(graph: Graph, value: Value, rows: int) -> tf.TensorSpec:
    """The spec of a tensor; a `ValueError` if more than its rows is unknown."""
    spec = graph.with_rows(value, rows)
    if None in spec.shape:
        raise ValueError(
            "Memory and time can be estimated only for known sizes. Received: "
            f"a tensor of shape {graph.specs[value].shape}, and no length from "
            f"1 to {UNKNOWN_LENGTH} that the layers of the model work with. "
            "Set the sizes of its inputs: `keras.Input((77,))`."
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
        return stage, trace.trace_stage(stage_graph).phases
