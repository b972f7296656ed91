"""A function of a record as a function of a batch, with the same bits.

Each operation is run on the batch in place of a record, if every one of them
computes a record without those beside it. `tf.io.parse_single_example` of a
vector of strings is `tf.io.parse_example`.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# The result of a record does not depend on the records beside it. Sums and
# exponentials are computed differently at the end of a vector.
_BROADCAST = ("AddV2", "Equal", "Mul", "RealDiv", "Sub")
_ON_BATCHES = frozenset(
    (
        *_BROADCAST,
        *("Cast", "Identity", "Reshape"),
        *("ParseExampleV2", "DecodeCSV", "DecodeJSONExample"),
        *("DecodePaddedRaw", "DecodeRaw"),
        *("LookupTableFindV2", "AsString", "StringToNumber"),
        *("StaticRegexFullMatch", "StaticRegexReplace"),
        *("StringLength", "StringLower", "StringStrip", "StringUpper"),
        *("StringToHashBucketFast", "StringToHashBucketStrong"),
    )
)


class NotOnBatchesError(Exception):
    """A function cannot run on batches; the message says why."""


def on_batches(function: Callable[..., Any], raw: Any) -> Callable[..., Any]:
    """The function of a record as one of a batch and the records' `numbers`.

    `raw` is a record.
    """
    spec = keras.tree.map_structure(tf.TensorSpec.from_tensor, raw)
    traced = tf.function(function).get_concrete_function(spec)
    graph, num_inputs = traced.graph, len(tf.nest.flatten(spec))
    of_records = {t.name for t in graph.inputs[:num_inputs]}
    operations = []
    for operation in graph.get_operations():
        if of_records.isdisjoint(t.name for t in operation.inputs):
            if operation.type not in ("Const", "NoOp", "Placeholder"):
                raise NotOnBatchesError(f"it uses {operation.type}")
            continue
        _check(operation, of_records)
        of_records.update(t.name for t in operation.outputs)
        operations.append(operation)
    outputs = tf.nest.flatten(graph.structured_outputs)
    if not of_records.issuperset(t.name for t in outputs):
        raise NotOnBatchesError(
            "it returns something that is not of the record"
        )

    @tf.autograph.experimental.do_not_convert
    def batched(*batch, numbers):
        given = [*tf.nest.flatten(batch), *traced.captured_inputs]
        known = {
            t.name: value for t, value in zip(graph.inputs, given, strict=True)
        }

        def value(t):
            if t.name not in known:  # the same for each record
                known[t.name] = tf.constant(tf.get_static_value(t))
            return known[t.name]

        for operation in operations:
            found = _run(operation, list(map(value, operation.inputs)), numbers)
            names = (t.name for t in operation.outputs)
            known.update(zip(names, found, strict=True))
        return tf.nest.pack_sequence_as(
            graph.structured_outputs, [known[t.name] for t in outputs]
        )

    return batched


def _check(operation, of_records):
    kind = operation.type
    if kind not in _ON_BATCHES:
        raise NotOnBatchesError(f"it uses {kind}")
    if kind == "Cast":
        given, result = operation.inputs[0].dtype, operation.outputs[0].dtype
        if given.is_floating and result.is_integer:
            raise NotOnBatchesError(
                "it casts floats to integers, which are others in a vector "
                "where they are out of range"
            )
    if kind == "Reshape" and operation.inputs[1].name in of_records:
        raise NotOnBatchesError("it gives each record a shape of its own")
    if kind in _BROADCAST:
        ranks = [t.shape.rank for t in operation.inputs]
        record_ranks = [
            t.shape.rank for t in operation.inputs if t.name in of_records
        ]
        if None in ranks or min(record_ranks) != max(ranks):
            raise NotOnBatchesError(f"it uses {kind} of several ranks")
    if kind == "ParseExampleV2":
        shapes = map(tf.TensorShape, operation.get_attr("dense_shapes"))
        if (
            operation.get_attr("num_sparse")
            or operation.get_attr("ragged_value_types")
            or not all(shape.is_fully_defined() for shape in shapes)
        ):
            raise NotOnBatchesError("it parses features of variable length")


def _run(operation, inputs, numbers):
    if operation.type == "Reshape":
        values, shape = inputs
        size = tf.shape(values, shape.dtype)[:1]
        return [tf.reshape(values, tf.concat([size, shape], 0))]
    if operation.type == "DecodeRaw":
        inputs = [_of_one_length(inputs[0], numbers)]
    on_batch = tf.compat.v1.get_default_graph().create_op(
        operation.type,
        inputs,
        [t.dtype for t in operation.outputs],
        attrs=dict(operation.node_def.attr),
    )
    return on_batch.outputs


def _of_one_length(strings, numbers):
    """The strings, which must have one length; the error names a record."""
    lengths = tf.strings.length(strings)
    # A record may be a vector of strings, all of which have that length.
    first = tf.reshape(lengths, [-1])[:1]
    others = tf.where(lengths != first)
    check = tf.debugging.Assert(
        tf.equal(tf.size(others), 0),
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
