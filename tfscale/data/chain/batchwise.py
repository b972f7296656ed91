"""Whether records are parsed one by one or a batch at a time.

A single record costs 20 to 50 microseconds in the chain, whatever its `parse`
does, so batches of small records are parsed 7 to 11 times faster: by the user's
`parse_batch`, or by `parse` if all its operations take a batch in place of a
record. `tf.io.parse_single_example` of a vector of strings is
`tf.io.parse_example`. Some records are parsed both ways, and must have the same
bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.chain.recipe import Recipe
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource

FEW_RECORDS = 2048  # are parsed before two ways could be compared
_LARGE_BATCH = 4 << 20  # bytes: worth a core for each record
_TRIED = 16  # records
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


class _NotOnBatchesError(Exception):
    """A function cannot run on batches; the message says why."""


def decided(
    recipe: Recipe, parse_batch: Callable[..., Any] | None, raw: Any
) -> Recipe:
    """The recipe with its way of parsing; `raw` is the first record as read.

    Raises:
        ValueError: If `parse_batch` does not return what `parse` does.
    """

    def chosen(reason, function=None, batchwise=False):
        return dataclasses.replace(
            recipe,
            parse_batch=function,
            batchwise=batchwise,
            parse_reason=reason,
        )

    source = recipe.source
    if recipe.padding is not None:
        if parse_batch is not None:
            raise ValueError(
                "Records of several lengths are parsed one by one. Received: "
                "`padding` and `parse_batch`. Use `parse`."
            )
        return chosen("batches are padded")
    if not _comes_in_batches(source):
        if parse_batch is not None:
            raise ValueError(
                "`parse_batch` is for sources whose records can be read a "
                "batch at a time: arrays, tokens, TFRecord, CSV and datasets "
                f"of fixed shapes. Received: {source.kind}. Use `parse`."
            )
        return chosen(f"{source.kind} are read one by one")
    if parse_batch is not None:

        def asked(*batch, numbers):
            del numbers
            return parse_batch(*batch)

        _compare(recipe, asked)
        return chosen("as asked, with `parse_batch`", asked, True)
    if recipe.parse is None:
        # Records that are augmented one by one are not batched before.
        return chosen("nothing is parsed", None, recipe.augment is None)
    if source.num_records < FEW_RECORDS:
        return chosen(f"there are fewer than {FEW_RECORDS}")
    if recipe.record_bytes() * recipe.plan.batch_size > _LARGE_BATCH:
        return chosen("records are large")
    try:
        batched = _on_batches(recipe.parsed, raw)
        _compare(recipe, batched)
    except _NotOnBatchesError as error:
        return chosen(str(error))
    except (tf.errors.OpError, ValueError) as error:
        reason = f"some records failed when they were tried: {error}"
        return chosen(reason.split("\n")[0])
    return chosen("the same bits are found by batches", batched, True)


def of_one(parse_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a record that calls a function of a batch."""

    def parse(*record):
        batch = keras.tree.map_structure(lambda t: t[tf.newaxis], record)
        return keras.tree.map_structure(lambda t: t[0], parse_batch(*batch))

    return parse


def _comes_in_batches(source):
    if source.decode is not None:
        return False
    if isinstance(source, IndexedSource):
        return source.gather is not None
    return isinstance(source, BlockSource) or all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        for spec in tf.nest.flatten(source.dataset.element_spec)
    )


def _compare(recipe, batched):
    records = recipe.source.sample(_TRIED)
    want = next(iter(recipe.map_parsed(records).batch(_TRIED)))
    for size in (_TRIED, 3):  # nothing may depend on the batch
        batches = records.batch(size).map(
            lambda *b: batched(*b, numbers=tf.range(_TRIED, dtype=tf.int64))
        )
        keras.tree.assert_same_structure(want, batches.element_spec)
        found = zip(*map(tf.nest.flatten, batches), strict=True)
        for one, tensors in zip(tf.nest.flatten(want), found, strict=True):
            other = tf.concat(tensors, 0)
            if one.shape != other.shape or _bits(one) != _bits(other):
                raise ValueError(
                    "A batch must be parsed to the records that `parse` "
                    "returns, bit for bit, along its first dimension. "
                    f"Received: {other.dtype.name} of shape {other.shape} "
                    f"where {one.dtype.name} of shape {one.shape} belongs, or "
                    "other values."
                )


def _bits(tensor):
    return tf.io.serialize_tensor(tensor).numpy()


def _on_batches(function, raw):
    """A function of a record, as a function of a batch and its `numbers`."""
    spec = keras.tree.map_structure(tf.TensorSpec.from_tensor, raw)
    traced = tf.function(function).get_concrete_function(spec)
    graph, num_inputs = traced.graph, len(tf.nest.flatten(spec))
    of_records = {t.name for t in graph.inputs[:num_inputs]}
    operations = []
    for operation in graph.get_operations():
        if of_records.isdisjoint(t.name for t in operation.inputs):
            if operation.type not in ("Const", "NoOp", "Placeholder"):
                raise _NotOnBatchesError(f"it uses {operation.type}")
            continue
        _check(operation, of_records)
        of_records.update(t.name for t in operation.outputs)
        operations.append(operation)
    outputs = tf.nest.flatten(graph.structured_outputs)
    if not of_records.issuperset(t.name for t in outputs):
        raise _NotOnBatchesError(
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
        raise _NotOnBatchesError(f"it uses {kind}")
    if kind == "Cast":
        given, result = operation.inputs[0].dtype, operation.outputs[0].dtype
        if given.is_floating and result.is_integer:
            raise _NotOnBatchesError(
                "it casts floats to integers, which are others in a vector "
                "where they are out of range"
            )
    if kind in _BROADCAST:
        ranks = [t.shape.rank for t in operation.inputs]
        record_ranks = [
            t.shape.rank for t in operation.inputs if t.name in of_records
        ]
        if None in ranks or min(record_ranks) != max(ranks):
            raise _NotOnBatchesError(f"it uses {kind} of several ranks")
    if kind == "ParseExampleV2":
        shapes = map(tf.TensorShape, operation.get_attr("dense_shapes"))
        if (
            operation.get_attr("num_sparse")
            or operation.get_attr("ragged_value_types")
            or not all(shape.is_fully_defined() for shape in shapes)
        ):
            raise _NotOnBatchesError("it parses features of variable length")


def _run(operation, inputs, numbers):
    if operation.type == "Reshape":
        size = tf.shape(inputs[0])[:1]
        return [tf.reshape(inputs[0], tf.concat([size, inputs[1]], 0))]
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
