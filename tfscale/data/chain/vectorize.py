"""A function of a record, rewritten as one of a batch that gives the same bits.

Only operations whose result for a record cannot depend on the records beside
it are rewritten: copies, IEEE arithmetic, comparisons, and parsing. A sum or
an exponential is added up or approximated in another way in the middle of a
long vector than at its end, so what holds one is left alone.

    record -> [decode_raw] -> (cast, divide, reshape) -> [regex_replace] -> ...
               as it is         tf.vectorized_map         as it is

What works on strings one by one takes a batch as it is; what lies between is
what `tf.vectorized_map` (Agarwal and Ganichev, "Auto-Vectorizing TensorFlow
Graphs", 2019) is for.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.data.chain import exact_operations


class NotExactError(Exception):
    """A function cannot be rewritten; the message says why."""


def vectorized(
    function: Callable[..., Any], specs: list[tf.TensorSpec]
) -> Callable[..., Any]:
    """Rewrites a function of records.

    Args:
        function: Function of tensors, one for each of `specs`, that returns a
            structure of dense tensors.
        specs: List of `tf.TensorSpec`: a record.

    Returns:
        Function of tensors with one more dimension in front, the batch, that
        returns what `function` does, with that dimension. Its `numbers`, an
        int64 vector, are those of the records, for errors.

    Raises:
        NotExactError: If the function holds an operation whose result might
            be another one in a batch.
    """
    traced = tf.function(function).get_concrete_function(*specs)
    graph = traced.graph
    operations = _reached(graph)
    for operation in operations:
        _check(operation)
    imported = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(
            graph.as_graph_def(add_shapes=True), name=""
        ),
        [],
    )
    inputs = graph.inputs[: len(specs)]
    captured = {
        inner.name: outer
        for inner, outer in zip(
            graph.inputs[len(specs) :], traced.captured_inputs, strict=True
        )
    }
    outputs = tf.nest.flatten(graph.structured_outputs)
    on_strings = [
        op for op in operations if op.type in exact_operations.ON_STRINGS
    ]
    drawn = [
        t
        for op in operations
        if op.type in exact_operations.RANDOM
        for t in op.outputs
    ]

    @tf.autograph.experimental.do_not_convert
    def batched(*batch, numbers):
        known = {t.name: part for t, part in zip(inputs, batch, strict=True)}
        _draw(imported, known, captured, drawn)
        for operation in on_strings:
            values = _values(operation, known, captured, imported)
            if operation.type == "DecodeRaw":
                values = [_of_one_length(values[0], numbers)]
            known[operation.outputs[0].name] = _emit(operation, values)
        _map(imported, known, captured, outputs)
        return tf.nest.pack_sequence_as(
            graph.structured_outputs, [known[t.name] for t in outputs]
        )

    return batched


def _reached(graph):
    """Operations that the outputs depend on, in the order of the graph."""
    # What only has an effect, such as a print, counts as well.
    reached = set()
    todo = [*(t.op for t in graph.outputs), *graph.control_outputs]
    while todo:
        operation = todo.pop()
        if operation.name not in reached:
            reached.add(operation.name)
            todo += [t.op for t in operation.inputs]
            todo += operation.control_inputs
    return [op for op in graph.get_operations() if op.name in reached]


def _check(operation):
    kind = operation.type
    exact = kind in (
        exact_operations.ON_STRINGS
        | exact_operations.ANY
        | exact_operations.RANDOM
    )
    if kind in exact_operations.OF_INTEGERS:
        exact = operation.outputs[0].dtype.is_integer
    if not exact:
        raise NotExactError(f"it uses {kind}")
    if kind == "Cast" and _is_narrowing(operation):
        raise NotExactError(
            "it casts floats to a small integer, which is another one in a "
            "vector where they are out of its range"
        )
    if kind == "ParseExampleV2":
        shapes = operation.get_attr("dense_shapes")
        ragged = operation.get_attr("ragged_value_types")
        if operation.get_attr("num_sparse") or ragged:
            raise NotExactError("it parses features of variable length")
        if not all(tf.TensorShape(s).is_fully_defined() for s in shapes):
            # Padded to the longest of a batch.
            raise NotExactError("it parses sequences of variable length")
    if kind in exact_operations.RANDOM and any(
        not t.shape.is_fully_defined() for t in operation.outputs
    ):
        raise NotExactError("it draws a number of values that is not known")
    if kind == "Substr" and any(len(t.shape) for t in operation.inputs):
        raise NotExactError("it uses Substr of more than one string")


def _is_narrowing(cast):
    """From floats to what the processor converts to by way of an int32."""
    given, made = cast.inputs[0].dtype, cast.outputs[0].dtype
    exact = (tf.int32, tf.int64, tf.uint64)
    return given.is_floating and made.is_integer and made not in exact


def _values(operation, known, captured, imported):
    """What goes into an operation on strings."""
    _map(
        imported,
        known,
        captured,
        [
            t
            for t in operation.inputs
            if t.name not in captured and tf.get_static_value(t) is None
        ],
    )
    return [
        known[t.name]
        if t.name in known
        else captured.get(t.name, tf.get_static_value(t))
        for t in operation.inputs
    ]


def _draw(imported, known, captured, tensors):
    """Adds to `known` what is drawn, for one record after the other."""
    if not tensors:
        return
    feeds = _cut(tensors, known)
    if not feeds:
        raise NotExactError("it draws from no seed of a record")
    function = imported.prune(
        feeds=[*feeds, *captured], fetches=[t.name for t in tensors]
    )
    values = tf.map_fn(
        lambda parts: function(*parts, *captured.values()),
        [known[name] for name in feeds],
        fn_output_signature=[tf.TensorSpec(t.shape, t.dtype) for t in tensors],
    )
    known.update(zip([t.name for t in tensors], values, strict=True))


def _map(imported, known, captured, tensors):
    """Adds tensors to `known`, computed from those that are."""
    names = list(dict.fromkeys(t.name for t in tensors if t.name not in known))
    if not names:
        return
    feeds = _cut(tensors, known)
    function = imported.prune(
        feeds=[*feeds, *captured], fetches=[[name] for name in names]
    )
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs what it raises, at length
    try:
        values = tf.vectorized_map(
            lambda parts: function(*parts, *captured.values()),
            [known[name] for name in feeds],
            fallback_to_while_loop=False,
        )
    except ValueError as error:
        raise NotExactError("`tf.vectorized_map` cannot convert it") from error
    finally:
        logger.setLevel(level)
    known.update((name, value) for name, (value,) in zip(names, values))


def _cut(tensors, known):
    """Names of the known tensors that others are computed from."""
    cut, seen, todo = [], set(), [t for t in tensors if t.name not in known]
    while todo:
        for t in todo.pop().op.inputs:
            if t.name in known:
                cut.append(t.name)
            elif t.name not in seen:
                seen.add(t.name)
                todo.append(t)
    return list(dict.fromkeys(cut))


def _emit(operation, values):
    """The operation on other inputs."""
    if operation.type == "Substr":
        # The only one that does not broadcast scalars.
        shape = tf.shape(next(v for v in values if len(v.shape)))
        values = [tf.broadcast_to(value, shape) for value in values]
    make = getattr(tf.raw_ops, operation.type)
    accepted = inspect.signature(make).parameters
    arguments = {
        definition.name: value
        for definition, value in zip(
            operation.op_def.input_arg, values, strict=True
        )
    }
    for attribute in operation.op_def.attr:
        if attribute.name in accepted:
            arguments[attribute.name] = operation.get_attr(attribute.name)
    return make(**arguments)


def _of_one_length(strings, numbers):
    """The strings, which must make rows of one length."""
    lengths = tf.strings.length(strings)
    # Of a record that is a vector of strings, all have that length as well.
    first = tf.reshape(lengths, [-1])[:1]
    same = tf.equal(lengths, first)
    others = tf.where(tf.logical_not(same))
    check = tf.debugging.Assert(
        tf.reduce_all(same),
        [
            "Records must have one shape, or they cannot be batched. Record",
            tf.gather(numbers, others[:1, 0]),
            "has shape",
            tf.gather_nd(lengths, others[:1]),
            "and record",
            numbers[:1],
            "has",
            first,
            "in bytes. Resize, crop or pad in `parse`.",
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(strings)
