"""Labels of operations that move, cut, join and copy entries."""

from tfscale.tensor_parallel.propagation import labels
from tfscale.tensor_parallel.propagation.labels import Labels
from tfscale.tensor_parallel.propagation.labels import NoRule


def _transpose(op):
    dims = labels.dims_of(op.inputs[0])
    order = tuple(dims[index] for index in labels.constant(op.inputs[1]))
    return Labels((dims, None), (order,))


def _concat(op):
    *values, axis = op.inputs
    axis = int(labels.constant(axis))
    kept = [labels.without(labels.dims_of(value), axis) for value in values]
    return Labels((*kept, None), (kept[0],))


def _pack(op):
    dims = labels.dims_of(op.inputs[0])
    made = list(dims)
    made.insert(op.get_attr("axis") % (len(dims) + 1), None)
    return Labels((dims,) * len(op.inputs), (tuple(made),))


def _unpack(op):
    dims = labels.dims_of(op.inputs[0])
    axis = dims[op.get_attr("axis")]
    kept = tuple(dim for dim in dims if dim != axis)
    return Labels((dims,), (kept,) * len(op.outputs))


def _split(op):
    # `Split` takes the axis first, `SplitV` last, after the sizes.
    value, axis = (1, 0) if op.type == "Split" else (0, 2)
    axis = int(labels.constant(op.inputs[axis]))
    return labels.mixing(op, axis, operand=value)


def _expand_dims(op):
    dims = labels.dims_of(op.inputs[0])
    made = list(dims)
    made.insert(int(labels.constant(op.inputs[1])) % (len(dims) + 1), None)
    return Labels((dims, None), (tuple(made),))


def _squeeze(op):
    dims = labels.dims_of(op.inputs[0])
    # Without axes it drops every dim of size 1, and so perhaps a local one.
    axes = {dims[axis] for axis in op.get_attr("squeeze_dims")}
    if not axes:
        raise NoRule("it names no axis")
    return Labels((dims,), (tuple(dim for dim in dims if dim not in axes),))


def _pad(op):
    pads = labels.constant(op.inputs[1])
    padded = [dim for dim, pad in enumerate(pads) if any(pad)]
    return labels.mixing(op, *padded)


def _tile(op):
    repeats = labels.elements(op.inputs[1])
    if repeats is None:
        raise NoRule("its multiples are not known")
    tiled = [dim for dim, repeat in enumerate(repeats) if repeat != 1]
    return labels.mixing(op, *tiled)


def _gather(op):
    params, indices, axis = op.inputs
    dims, axis = labels.dims_of(params), int(labels.constant(axis))
    axis = dims[axis]
    batch_dims = op.get_attr("batch_dims")
    if batch_dims < 0:
        batch_dims += labels.rank_of(indices)
    looked_up = tuple(
        index if index < batch_dims else f"index {index}"
        for index in labels.dims_of(indices)
    )
    made = (*dims[:axis], *looked_up[batch_dims:], *dims[axis + 1 :])
    return Labels((dims, looked_up, None), (made,))


def _slice(op):
    dims = labels.dims_of(op.inputs[0])
    begin, size = labels.elements(op.inputs[1]), labels.elements(op.inputs[2])
    if begin is None or size is None:
        raise NoRule("the number of its limits is not known")
    cut = [dim for dim in dims if (begin[dim], size[dim]) != (0, -1)]
    return labels.mixing(op, *cut)


def _strided_slice(op):
    value, *limits = op.inputs
    begin, end, strides = map(labels.elements, limits)
    if begin is None or end is None or strides is None:
        raise NoRule("the number of its limits is not known")

    def masked(name, entry):
        return op.get_attr(f"{name}_mask") >> entry & 1

    entries = range(len(begin))
    num_sliced = sum(
        not (masked("new_axis", entry) or masked("ellipsis", entry))
        for entry in entries
    )
    dims = list(labels.dims_of(value))
    made = []
    for entry in entries:
        if masked("ellipsis", entry):
            hidden = len(dims) - num_sliced
            made += dims[:hidden]
            del dims[:hidden]
            continue
        if masked("new_axis", entry):
            made.append(None)
            continue
        dim = dims.pop(0)
        num_sliced -= 1
        if masked("shrink_axis", entry):
            continue
        # A limit beyond the end means the end, also on a shard.
        size = value.shape[dim]
        starts = masked("begin", entry) or begin[entry] == 0
        ends = masked("end", entry) or (
            None not in (end[entry], size) and end[entry] >= size
        )
        full = starts and ends and strides[entry] == 1
        made.append(dim if full else None)
    made += dims
    return Labels((labels.dims_of(value), None, None, None), (tuple(made),))


RULES = {
    "ConcatV2": _concat,
    "ExpandDims": _expand_dims,
    "GatherV2": _gather,
    "MirrorPad": _pad,
    "Pack": _pack,
    "Pad": _pad,
    "PadV2": _pad,
    "Slice": _slice,
    "Split": _split,
    "SplitV": _split,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}
