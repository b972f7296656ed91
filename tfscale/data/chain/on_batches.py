"""A function of a record, run on a batch of records by the same operations.

Parsing takes a batch in place of a record: `tf.io.parse_single_example` of a
vector of strings is `tf.io.parse_example`. So do operations on strings, exact
arithmetic and `reshape`; a function that holds any other is left alone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# Each record's result is the same whatever records are beside it. A sum or an
# exponential is added up or approximated differently at a vector's end.
_ON_BATCHES = frozenset(
    (
        *("Identity", "Reshape"),
        *("AddV2", "Cast", "Equal", "Mul", "RealDiv", "Sub"),
        *("ParseExampleV2", "DecodeCSV", "DecodeJSONExample"),
        *("DecodePaddedRaw", "DecodeRaw"),
        *("LookupTableFindV2", "AsString", "StringToNumber"),
        *("StaticRegexFullMatch", "StaticRegexReplace"),
        *("StringLength", "StringLower", "StringStrip", "StringUpper"),
        *("StringToHashBucketFast", "StringToHashBucketStrong"),
    )
)
_BROADCAST = ("AddV2", "Equal", "Mul", "RealDiv", "Sub")


class NotKnownError(Exception):
    """A function cannot be run on batches; the message says why."""


def of_batches(function: Callable[[Any], Any], raw: Any) -> Callable[..., Any]:
    """A function of a record, as one of a batch and its `numbers`.

    Args:
        function: Function of a record.
        raw: Structure of eager tensors, a record.

    Returns:
        Function of a batch of records, and of their `numbers`, an int64
        vector, which are for errors.

    Raises:
        NotKnownError: If the function holds another operation than those above.
    """
    spec = keras.tree.map_structure(tf.TensorSpec.from_tensor, raw)
    traced = tf.function(function).get_concrete_function(spec)
    graph = traced.graph
    inputs = graph.inputs[: len(tf.nest.flatten(spec))]
    captured = graph.inputs[len(inputs) :]
    # Of which tensors there is one for each record.
    of_records = {t.name for t in inputs}
    operations = []
    for operation in graph.get_operations():
        if of_records.isdisjoint(t.name for t in operation.inputs):
            if operation.type not in ("Const", "NoOp", "Placeholder"):
                raise NotKnownError(f"it uses {operation.type}")
            continue
        _check(operation, of_records)
        of_records.update(t.name for t in operation.outputs)
        operations.append(operation)
    outputs = tf.nest.flatten(graph.structured_outputs)
    if not of_records.issuperset(t.name for t in outputs):
        raise NotKnownError("it returns something that is not of the record")

    @tf.autograph.experimental.do_not_convert
    def batched(*batch, numbers):
        flat = tf.nest.flatten(batch)
        known = {t.name: part for t, part in zip(inputs, flat, strict=True)}
        outer = zip(captured, traced.captured_inputs, strict=True)
        known.update((t.name, tensor) for t, tensor in outer)

        def value(t):
            if t.name not in known:  # the same for each record
                known[t.name] = tf.constant(tf.get_static_value(t))
            return known[t.name]

        for operation in operations:
            arguments = list(map(value, operation.inputs))
            made = tf.nest.flatten(_run(operation, arguments, numbers))
            names = (t.name for t in operation.outputs)
            known.update(zip(names, made, strict=True))
        return tf.nest.pack_sequence_as(
            graph.structured_outputs, [known[t.name] for t in outputs]
        )

    return batched


def _check(operation, of_records):
    """Refuses what is not known to be right on a batch."""
    kind = operation.type
    if kind not in _ON_BATCHES:
        raise NotKnownError(f"it uses {kind}")
    if kind == "Cast":
        given, made = operation.inputs[0].dtype, operation.outputs[0].dtype
        if given.is_floating and made.is_integer:
            raise NotKnownError(
                "it casts floats to integers, which are others in a vector "
                "where they are out of range"
            )
    if kind in _BROADCAST:
        ranks = [t.shape.rank for t in operation.inputs]
        names = [t.name for t in operation.inputs]
        own = [r for r, n in zip(ranks, names) if n in of_records]
        if None in ranks or min(own) != max(ranks):
            raise NotKnownError(f"it uses {kind} of several ranks")
    if kind == "ParseExampleV2":
        shapes = map(tf.TensorShape, operation.get_attr("dense_shapes"))
        if (
            operation.get_attr("num_sparse")
            or operation.get_attr("ragged_value_types")
            or not all(shape.is_fully_defined() for shape in shapes)
        ):
            raise NotKnownError("it parses features of variable length")


def _run(operation, inputs, numbers):
    """The outputs of an operation for a batch of its inputs."""
    if operation.type == "Reshape":
        size = tf.shape(inputs[0])[:1]
        return tf.reshape(inputs[0], tf.concat([size, inputs[1]], 0))
    if operation.type == "DecodeRaw":
        inputs = [_of_one_length(inputs[0], numbers)]
    function = getattr(tf.raw_ops, operation.type)
    accepted = inspect.signature(function).parameters
    arguments, left = {}, iter(inputs)
    for argument in operation.op_def.input_arg:
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        else:
            arguments[argument.name] = next(left)
            continue
        arguments[argument.name] = [next(left) for _ in range(count)]
    for attribute in operation.op_def.attr:
        if attribute.name in accepted:
            arguments[attribute.name] = operation.get_attr(attribute.name)
    return function(**arguments)


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
