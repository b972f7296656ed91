"""Finds operations of a model that mix the rows of a batch.

A mean over the batch, `flip(x, 0)` or attention between rows sees the rows of
one replica or microbatch, and on one device those of the whole batch. The graph
of a model is followed from its inputs to its outputs. For each tensor the dims
along which the rows lie are noted:

    x (0) ── Reshape (0) ─┬─ Transpose (1) ─ MatMul (1) ─ Transpose (0) ─ y
                          └─ Mean over 1, 2 (0)     fine
                          └─ Mean over 0, 1 ()      mixes rows

A tensor that is also computed from other replicas' rows is of the whole batch.
Layers of Keras (BatchNormalization) are right, or documented. An operation that
cannot be judged counts as right.
"""

import os
import warnings
import weakref
from collections.abc import Iterable
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale import _version
from tfscale.graphs import walks
from tfscale.step import batch_norm
from tfscale.tensor_parallel.propagation import moving_rules
from tfscale.tensor_parallel.propagation import operation_rules
from tfscale.tensor_parallel.propagation.placements import NoRule

_WITHOUT_VALUES = frozenset(
    ["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"]
)
_KERAS = os.path.dirname(keras.__file__)
_LAYERS_OF_KERAS = os.path.join(_KERAS, "src", "layers", "")
# Every call of a layer passes through this function.
_ANY_LAYER = os.path.join(_LAYERS_OF_KERAS, "layer.py")
# Called by the rule of a layer that is divided over ranks, too.
_BATCH_NORM = batch_norm.__file__
_PASSED_OVER = (
    os.path.dirname(tf.__file__),
    os.path.dirname(_version.__file__),
    os.path.join(_KERAS, "src", "backend"),
    os.path.join(_KERAS, "src", "ops"),
    os.path.join(_KERAS, "src", "utils"),
)

# Models that were checked, with and without a loss, and those with a warning.
_SEEN: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_SEEN_IN_PREDICT: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_WARNED: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def check(
    model: keras.Model,
    inputs,
    outputs,
    other_inputs: Iterable[tf.Tensor] = (),
    in_predict: bool = False,
) -> None:
    """Warns, once for a model, of operations that mix the rows of its inputs.

    Tensors that are also computed from `other_inputs`, those of other replicas,
    may.
    """
    seen = _SEEN_IN_PREDICT if in_predict else _SEEN
    if model in seen:
        return
    seen.add(model)
    whole = walks.descendants(x.op for x in _symbolic(other_inputs))
    warn(model, mixing_operations(_symbolic(inputs), _symbolic(outputs), whole))


def warn(model: keras.Model, found: Sequence[str]) -> None:
    """Warns, once for a model, of what `mixing_operations` has found."""
    if found and model not in _WARNED:
        _WARNED.add(model)
        warnings.warn(
            "A layer should treat each row of the batch by itself: in parts of "
            "a batch (replicas, microbatches) it sees the rows of its part. "
            f"Received: {', '.join(found[:3])}, which mixes rows. Numbers "
            "differ from one device: train in one part if that matters, or "
            "let the layer sum over replicas (docs/numbers.md).",
            stacklevel=3,
        )


def mixing_operations(
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    stop: Iterable[tf.Operation] = (),
) -> list[str]:
    """Describes the operations between, not before `stop`, that mix rows."""
    if not inputs or not outputs:
        return []
    operations = inputs[0].graph.get_operations()
    # Their outputs contain rows of other workers too.
    stop = {*stop, *(op for op in operations if "Collective" in op.type)}
    needed = walks.ancestors([tensor.op for tensor in outputs], stop)
    row_dims = {tensor.name: {0} for tensor in inputs if tensor.shape.rank}
    found = []
    for op in operations:
        if op in needed and any(x.name in row_dims for x in op.inputs):
            given = [row_dims.get(x.name, set()) for x in op.inputs]
            made, mixes = _row_dims_of_outputs(op, given)
            if mixes and not _is_inside_keras_layer(op):
                found.append(_described(op))
            row_dims.update(
                (x.name, dims)
                for x, dims in zip(op.outputs, made)
                if dims and x.name not in row_dims
            )
    return found


def _symbolic(structure):
    return [
        x
        for x in keras.tree.flatten(structure)
        if isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x)
    ]


def _row_dims_of_outputs(op, given):
    """The dims of each output along which rows lie, and whether rows mix."""
    if op.type in _WITHOUT_VALUES:
        return [], False
    if op.type == "IdentityN":
        return given, False
    if op.type == "RandomShuffle":
        return given, 0 in given[0]
    try:
        rule = operation_rules.labels_of(op)
    except NoRule:
        return [_kept(op, given, x) for x in op.outputs], False
    rows = {
        of_input[dim]
        for of_input, dims in zip(rule.inputs, given)
        if of_input is not None
        for dim in dims
    }
    made = [
        {dim for dim, label in enumerate(of_output) if label in rows - {None}}
        for of_output in rule.outputs
    ]
    is_lost = not any(made)
    is_pair = len(op.inputs) > 1 and max(map(len, made)) > 1
    mixes = is_pair or (is_lost and op.type not in moving_rules.RULES)
    is_real = op.outputs[0].dtype.is_floating
    return ([] if is_pair else made), mixes and is_real


def _kept(op, given, output):
    """Without a rule, rows stay in front if their number may be unchanged."""
    may_merge = op.type == "Reshape" and op.outputs[0].shape[0] != 1
    are_in_front = any(
        0 in dims
        and output.shape.rank
        and (output.shape[0] == tensor.shape[0] or may_merge)
        for tensor, dims in zip(op.inputs, given)
    )
    return {0} if are_in_front else set()


def _frame_of(op):
    for frame in reversed(op.traceback):
        if frame.filename != _ANY_LAYER and not frame.filename.startswith(
            _PASSED_OVER
        ):
            return frame
    return None


def _is_inside_keras_layer(op):
    if any(frame.filename == _BATCH_NORM for frame in op.traceback):
        return True
    frame = _frame_of(op)
    return frame is not None and frame.filename.startswith(_LAYERS_OF_KERAS)


def _described(op):
    frame = _frame_of(op)
    where = ""
    if frame is not None and not frame.filename.startswith(_KERAS):
        where = f" (line {frame.lineno} of {frame.filename})"
    return f"{op.type} {op.name!r}{where}"
