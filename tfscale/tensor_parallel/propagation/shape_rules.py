"""Shapes of sharded tensors, and operations that take such a shape.

`tf.shape` of a sharded tensor is not the same on all ranks as in the whole
model: the entry of the sharded dim is local. It may be used where it makes the
    result a shard of the whole: to reshape a sharded tensor, or to create a
    tensor of a shard's shape. All other uses fail.

A reshape keeps a tensor sharded if a dim of the output begins where the
sharded dim begins, and is divisible by the number of ranks:

    (2, 4*, 6) -> (2, 24*)      (2, 8*) -> (2, 4*, 2)      (4*, 6) -> (4*, 2, 3)

Rows in memory order then fall into the same shards before and after.
"""

import math

import tensorflow as tf

from tfscale.graphs import random_operations
from tfscale.tensor_parallel.propagation import labels
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.labels import NoRule
from tfscale.tensor_parallel.propagation.labels import Sharded
from tfscale.tensor_parallel.propagation.labels import Sizes


def is_shape_rule(op: tf.Operation, states: list) -> bool:
    """Whether the rule for an operation is here."""
    return op.type in _RULES or any(
        isinstance(state, Sizes) for state in states
    )


def apply(op: tf.Operation, states: list, facts: GraphFacts) -> list:
    """See `operation_rules.apply`."""
    index = _SHAPE_OPERANDS.get(op.type)
    if index is not None and isinstance(states[index], Sharded):
        raise NoRule("its shape is itself a sharded tensor")
    if op.type in _RULES:
        return _RULES[op.type](op, states, facts)
    if op.type == "Unpack":
        sizes = [(is_local,) for is_local in states[0].local]
    elif op.type in _SIZE_RULES:
        sizes = [_SIZE_RULES[op.type](op, states)]
    else:
        raise NoRule("it takes a size that is not the same on each rank")
    return [Sizes(local) if any(local) else None for local in sizes]


def _shape(op, states, facts):
    made = []
    for tensor, state in zip(op.inputs, states):
        # A vector of sizes is as long on every rank.
        if not isinstance(state, Sharded):
            made.append(None)
        else:
            rank = labels.rank_of(tensor)
            made.append(Sizes(tuple(dim == state.dim for dim in range(rank))))
    return made


def _size(op, states, facts):
    return [Sizes((True,)) if isinstance(states[0], Sharded) else None]


def _reshape(op, states, facts):
    data, shape = states
    if isinstance(data, Sizes):
        # As in `tf.repeat`, to ensure a scalar or a vector.
        if shape is None and op.outputs[0].shape.rank in (0, 1):
            return [data]
        raise NoRule("it reshapes a vector of sizes")
    if data is None:
        raise NoRule("its operand is whole, its shape is not")
    dim = _reshaped_dim(
        op.inputs[0].shape, op.outputs[0].shape, data, facts.num_ranks
    )
    _check_local(op, shape, dim, facts, infer=True)
    return [Sharded(dim)]


def _reshaped_dim(before, after, state, num_ranks):
    """The dim of the output that begins where the sharded one begins."""
    if before.rank is None or after.rank is None:
        raise NoRule("the number of dims of a tensor is not known")
    before, after = before.as_list(), after.as_list()
    for dim, size in enumerate(after):
        if size in (None, 1):
            continue
        if size % num_ranks == 0 and (
            _same_size(before[state.dim :], after[dim:])
            or _same_size(before[: state.dim], after[:dim], before, after)
        ):
            return dim
    raise NoRule(f"the sharded dim is lost from {before} to {after}")


def _same_size(left, right, left_whole=(), right_whole=()):
    """Whether two runs of dims certainly have as many entries."""
    sizes = [_known_size(run) for run in (left, right)]
    if 0 in (*left, *right) or sizes[0] != sizes[1]:
        return False
    unknown = [run.count(None) for run in (left, right)]
    if unknown == [0, 0]:
        return True
    # One unknown size on each side is equal if all others are.
    return (
        unknown == [1, 1]
        and left_whole.count(None) == right_whole.count(None) == 1
        and _known_size(left_whole) == _known_size(right_whole)
    )


def _known_size(dims):
    return math.prod(dim for dim in dims if dim is not None)


def _check_local(op, shape, dim, facts, infer):
    """Refuses a shape operand that is not the shape of a rank's shard."""
    local = [] if shape is None else list(shape.local)
    if any(is_local for index, is_local in enumerate(local) if index != dim):
        raise NoRule("its shape has a local size of another dim")
    if local and local[dim]:
        return
    entries = labels.elements(op.inputs[1])
    entry = entries[dim] if entries else None
    if infer and entry == -1:
        return
    if not (facts.retraced and entry == op.outputs[0].shape[dim]):
        raise NoRule(
            f"its shape asks for the whole dim {dim}, where a rank has a part"
        )


def _broadcast_to(op, states, facts):
    value, shape = states
    after = labels.rank_of(op.outputs[0])
    offset = after - labels.rank_of(op.inputs[0])
    if isinstance(value, Sizes):
        raise NoRule("it takes a size that is not the same on each rank")
    if value is not None:
        dim = value.dim + offset
    else:
        dim = _only_local(shape)
        if dim >= offset and op.inputs[0].shape[dim - offset] != 1:
            raise NoRule("its operand is whole, its shape is not")
    _check_local(op, shape, dim, facts, infer=False)
    return [Sharded(dim)]


def _made_of_shape(op, states, facts):
    shape, *others = states
    if any(others):
        raise NoRule("only its shape may differ between ranks")
    return [Sharded(_only_local(shape))]


def _only_local(shape):
    if shape.local.count(True) != 1:
        raise NoRule("its shape has more than one local size")
    return shape.local.index(True)


# Of a sharded tensor, or with its shape.
_RULES = {
    "BroadcastTo": _broadcast_to,
    "Fill": _made_of_shape,
    "Rank": lambda op, states, facts: [None],
    "Reshape": _reshape,
    "Shape": _shape,
    "ShapeN": _shape,
    "Size": _size,
    **dict.fromkeys(random_operations.ELEMENTWISE, _made_of_shape),
}
_SHAPE_OPERANDS = {
    "BroadcastTo": 1,
    "Fill": 0,
    "Reshape": 1,
    **dict.fromkeys(random_operations.ELEMENTWISE, 0),
}


# Of sizes, on the way from one shape to another: `reshape(x, (shape[0], heads *
# shape[2]))` takes entries out of a shape, multiplies and joins them. Each says
# which of the sizes that it makes are local.


def _same_local(op, states):
    if not op.outputs[0].dtype.is_integer:
        raise NoRule("it computes with a local size")
    return states[0].local


def _joined(op, states):
    values = states[:-1] if op.type == "ConcatV2" else states
    local = []
    for tensor, state in zip(op.inputs, values):
        if isinstance(state, Sharded):
            raise NoRule("it puts entries of a sharded tensor into a shape")
        size = tensor.shape.num_elements()
        if tensor.shape.rank not in (0, 1) or size is None:
            raise NoRule("the number of sizes that it joins is not known")
        local += state.local if state else (False,) * size
    if op.outputs[0].shape.rank != 1 or any(states[len(values) :]):
        raise NoRule("it does not make a vector of sizes")
    return tuple(local)


def _sizes_at(op, states):
    """Entries that a slice or a gather with constant indices takes."""
    sizes, *limits = states
    constants = [tf.get_static_value(tensor) for tensor in op.inputs[1:]]
    if not isinstance(sizes, Sizes) or any(limits):
        raise NoRule("it takes entries at places that differ between ranks")
    if op.outputs[0].shape.rank not in (0, 1):
        raise NoRule("it does not make a vector of sizes")
    if any(value is None for value in constants):
        raise NoRule("it takes sizes at places that are not constant")
    if op.type == "GatherV2":
        return tuple(sizes.local[index] for index in constants[0].reshape([-1]))
    begin, end, strides = (value.tolist() for value in constants)
    if (
        len(begin) != 1
        or op.get_attr("ellipsis_mask")
        or op.get_attr("new_axis_mask")
    ):
        raise NoRule("it does more than to take a run of sizes")
    if op.get_attr("shrink_axis_mask"):
        return (sizes.local[begin[0]],)
    first = None if op.get_attr("begin_mask") else begin[0]
    last = None if op.get_attr("end_mask") else end[0]
    return sizes.local[first : last : strides[0]]


def _product(op, states):
    # The product of sizes is local if one of them is.
    if op.outputs[0].shape.rank != 0:
        raise NoRule("it is no product of two sizes")
    if sum(sum(state.local) for state in states if state) != 1:
        raise NoRule("it multiplies local sizes")
    return (True,)


_SIZE_RULES = {
    "Cast": _same_local,
    "ConcatV2": _joined,
    "GatherV2": _sizes_at,
    "Identity": _same_local,
    "Mul": _product,
    "Pack": _joined,
    "StridedSlice": _sizes_at,
}
