"""Operations that make sizes from sizes, on the way from one shape to another.

`reshape(x, (shape[0], heads * shape[2]))` takes entries out of a shape,
multiplies and joins them. Of each entry it has to be known whether it is local.
"""

import tensorflow as tf

from tfscale.tensor_parallel.propagation.placements import NoRule
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.propagation.placements import Sizes


def sizes(op: tf.Operation, states: list) -> list[Sizes | None]:
    """What an operation makes of sizes, or raises `NoRule`.

    Args:
        op: An operation.
        states: For each input `Sizes`, `Sharded`, or None if it is whole.

    Returns:
        For each output `Sizes`, or None if it is the same on all ranks.
    """
    if op.type == "Unpack":
        made = [(is_local,) for is_local in states[0].local]
    elif op.type in _RULES:
        made = [_RULES[op.type](op, states)]
    else:
        raise NoRule("it takes a size that is not the same on each rank")
    return [Sizes(local) if any(local) else None for local in made]


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


def _taken(op, states):
    """Entries that a slice or a gather with constant places takes."""
    sizes, *limits = states
    constants = [tf.get_static_value(tensor) for tensor in op.inputs[1:]]
    if not isinstance(sizes, Sizes) or any(limits):
        raise NoRule("it takes entries at places that differ between ranks")
    if op.outputs[0].shape.rank not in (0, 1):
        raise NoRule("it does not make a vector of sizes")
    if any(value is None for value in constants):
        raise NoRule("it takes sizes at places that are not constant")
    if op.type == "GatherV2":
        return tuple(sizes.local[place] for place in constants[0].reshape([-1]))
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


_RULES = {
    "Cast": _same_local,
    "ConcatV2": _joined,
    "GatherV2": _taken,
    "Identity": _same_local,
    "Mul": _product,
    "Pack": _joined,
    "StridedSlice": _taken,
}
