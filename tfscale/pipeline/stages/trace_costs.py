"""What one trace of each call tells: sizes, FLOPs, and what it has need of.

Sizes that a model leaves open (the length of a sequence, height and width of
an image) have to be something before memory and times can be estimated. One
length stands for all of them at the inputs of the model; what it makes of the
other tensors is seen as the calls are traced, one after the other.
"""

import dataclasses

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.graphs import flops
from tfscale.graphs.noting_scope import NotingScope
from tfscale.pipeline.stages.graph import Call
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value

# What a dimension of an input counts that is unknown and not the batch.
UNKNOWN_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class TracedCosts:
    """What was found.

    Attributes:
        graph: The model, with all sizes but that of the batch, and with calls
            that know their variables.
        flops: Forward FLOPs of each call, for one example.
        length: What unknown sizes of inputs are taken to be, or None if there
            are none, or no length was found that the model can have.
    """

    graph: Graph
    flops: tuple[int, ...]
    length: int | None


def trace_costs(graph: Graph) -> TracedCosts:
    """Traces each call of a model; equal ones once.

    Unknown sizes are taken to be `UNKNOWN_LENGTH`, or the largest one below
    that the model can have: those with a table of positions have a longest.
    """
    walks = _Walks(graph)
    unknown = any(None in graph.specs[v].shape[1:] for v in graph.inputs)
    length = UNKNOWN_LENGTH if unknown else None
    while (walk := walks.walk(length)).failed is not None:
        length = walks.longest(length, walk.failed + 1)
    return TracedCosts(
        dataclasses.replace(walk.graph, calls=_with_variables(walk.graph)),
        tuple(walk.flops),
        length,
    )


def described(call: Call, graph: Graph):
    """Arguments of a call, with `keras.KerasTensor`s where tensors go.

    They are those of one example.
    """

    def fill(x):
        return graph.with_rows(x, 1) if isinstance(x, Value) else x

    return keras.tree.map_structure(fill, (call.args, call.kwargs))


@dataclasses.dataclass
class _Walk:
    """What is known of values, and FLOPs of calls, before one that failed."""

    graph: Graph
    flops: list
    failed: int | None = None


class _Walks:
    """Walks through the calls of a model, for one length or another."""

    def __init__(self, graph):
        self._graph = graph
        self._known = {}

    def walk(self, length, num_calls=None):
        """Traces calls. Without a length, unknown sizes stay unknown."""
        specs, multiples = dict(self._graph.specs), {}
        graph = dataclasses.replace(
            self._graph, specs=specs, multiples=multiples
        )
        walk = _Walk(graph, [])
        for value in graph.inputs:
            spec = specs[value]
            specs[value] = _sized(spec, [length] * len(spec.shape))
        for index, call in enumerate(graph.calls[:num_calls]):
            try:
                number, shapes = self._trace(call, graph, length)
            except Exception:  # whatever layers raise
                if length is None:
                    raise
                walk.failed = index
                break
            walk.flops.append(number)
            for value, shape in zip(call.outputs, shapes):
                if shape is None:  # a layer may give that
                    continue
                if shape and shape[0] and shape[0] > 1:
                    multiples[value] = shape[0]
                specs[value] = _traced(specs[value], shape)
        return walk

    def longest(self, too_long, num_calls):
        """The largest length that the first calls work with, or None."""
        low, high = 0, too_long
        # As many as there are in a table of the call that failed, it may be.
        failed = self._graph.calls[num_calls - 1]
        likely = sorted({n for n in _table_sizes(failed.variables) if n < high})
        while high - low > 1:
            middle = likely.pop() if likely else (low + high) // 2
            if self.walk(middle, num_calls).failed is None:
                low, likely = middle, [middle + 1] if not low else []
            else:
                high = middle
            likely = [size for size in likely if low < size < high]
        return low or None

    def _trace(self, call, graph, length):
        """FLOPs and output shapes of a call."""
        args, kwargs = described(call, graph)
        key = flops.call_key(call.operation, args, kwargs)
        if key not in self._known:
            function = flops.trace_call(call.operation, args, kwargs)
            if length is not None and _has_table_below(length, call.variables):
                # Only what is run tells that positions are too few.
                function(*map(_example, function.inputs[: len(call.inputs)]))
            outputs = keras.tree.flatten(function.structured_outputs)
            self._known[key] = (
                flops.function_flops(function),
                [None if x is None else tuple(x.shape) for x in outputs],
            )
        return self._known[key]


def _has_table_below(length, variables):
    """Whether there is a table with fewer rows, of positions perhaps."""
    return any(size < length for size in _table_sizes(variables))


def _table_sizes(variables):
    shapes = [tuple(v.shape) for v in variables]
    shapes = [shape[1:] if shape[:1] == (1,) else shape for shape in shapes]
    return [shape[0] for shape in shapes if len(shape) == 2]


def _example(tensor):
    make = tf.ones if tensor.dtype.is_floating else tf.zeros
    return make(tensor.shape, tensor.dtype)


def _sized(spec, sizes):
    """A spec with `sizes` where it does not know its own."""
    if spec.shape is None or None not in spec.shape[1:]:
        return spec
    shape = [
        size if known is None and dim else known
        for dim, (known, size) in enumerate(zip(spec.shape, sizes))
    ]
    return keras.KerasTensor(shape, spec.dtype)


def _traced(spec, shape):
    """The spec of what a layer made, whatever it had promised."""
    if len(shape) != len(spec.shape):
        return keras.KerasTensor(shape, spec.dtype)
    sizes = [
        promised if made is None else made
        for promised, made in zip(spec.shape, shape)
    ]
    if shape and spec.shape[0] is None:
        sizes[0] = None  # the batch
    return keras.KerasTensor(sizes, spec.dtype)


def _with_variables(graph):
    """Calls of a layer that is called more than once, with what each uses.

    An embedding that is not tied to the head which the same layer computes
    should live where it is looked up in, and the head where it is.
    """
    by_operation = {}
    for call in graph.calls:
        by_operation.setdefault(id(call.operation), []).append(call)
    without = {}
    for calls in by_operation.values():
        if len(calls) < 2 or len(calls[0].variables) < 2:
            continue
        used = [_used_variables(call, graph) for call in calls]
        by_any = set().union(*used)
        for call, by_this in zip(calls, used):
            without[id(call)] = frozenset(by_any - by_this)
    return tuple(
        dataclasses.replace(call, without=without.get(id(call), frozenset()))
        for call in graph.calls
    )


def _used_variables(call, graph):
    """Ids of the variables that a call reads, in training or without it."""
    args, kwargs = described(call, graph)
    scope = NotingScope()
    for training in (False, True):
        operation = _internals.operation_fn(call.operation, training=training)
        flops.trace_call(operation, args, kwargs, scope)
    return scope.read
