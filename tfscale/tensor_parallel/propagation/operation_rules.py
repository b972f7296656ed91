"""Labels of operations that compute, and where to find those of any other."""

import tensorflow as tf

from tfscale.graphs.einsum import einsum_labels
from tfscale.tensor_parallel.propagation import labels
from tfscale.tensor_parallel.propagation import moving_rules
from tfscale.tensor_parallel.propagation import shape_rules
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.labels import Labels
from tfscale.tensor_parallel.propagation.labels import NoRule
from tfscale.tensor_parallel.propagation.labels import Sharded

# Entry by entry, operands of fewer dims broadcast from the right.
_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 ApproximateEqual Asin Asinh Atan Atan2 Atanh
    BitwiseAnd BitwiseOr BitwiseXor Cast Ceil CheckNumerics ClipByValue Cos Cosh
    Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv
    FloorMod Greater GreaterEqual Identity Inv Invert IsFinite IsInf IsNan
    LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow
    PreventGradient RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad EluGrad LeakyReluGrad SeluGrad SoftplusGrad SoftsignGrad
    SigmoidGrad TanhGrad SqrtGrad RsqrtGrad Rint Round Rsqrt SelectV2 Selu
    Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square
    SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy
    Xlog1py Xlogy ZerosLike
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())


def apply(op: tf.Operation, states: list, facts: GraphFacts) -> list:
    """Each output's state: `Sharded`, `Sizes`, or None if it is whole.

    `states` are those of the inputs; raises `NoRule` if ranks cannot run the
    operation on their shards.
    """
    if op.type == "IdentityN":
        made = states
    elif shape_rules.is_shape_rule(op, states):
        made = shape_rules.apply(op, states, facts)
    else:
        made = _matched(op, states)
    for tensor, state in zip(op.outputs, made):
        if isinstance(state, Sharded):
            size = tensor.shape[state.dim]
            if size is None or size % facts.num_ranks:
                raise NoRule(f"it makes {size} entries of the sharded dim")
    return made


def _matched(op, states):
    """States of the outputs by the labels of the sharded dims."""
    found = labels_of(op)
    names = {
        dims and dims[state.dim]
        for dims, state in zip(found.inputs, states)
        if state
    }
    if len(names) > 1:
        raise NoRule("its operands are sharded along different dims")
    (name,) = names
    if name is None or any(name not in dims for dims in found.outputs):
        raise NoRule("it does not treat entries of the sharded dim apart")
    for tensor, dims, state in zip(op.inputs, found.inputs, states):
        if (
            state is None
            and dims
            and name in dims
            and tensor.shape[dims.index(name)] != 1
        ):
            raise NoRule(
                f"its operand {tensor.name!r} is whole",
                tensor,
                dims.index(name),
            )
    return [Sharded(dims.index(name)) for dims in found.outputs]


def labels_of(op: tf.Operation) -> Labels:
    """Returns the labels of an operation, or raises `NoRule`."""
    if op.type in ELEMENTWISE:
        return _elementwise(op)
    if op.type in _RULES:
        return _RULES[op.type](op)
    raise NoRule("there is no rule for this type of operation")


def _elementwise(op):
    return Labels(
        tuple(labels.dims_from_right(tensor) for tensor in op.inputs),
        tuple(labels.dims_from_right(tensor) for tensor in op.outputs),
    )


def _bias_add(op):
    dims = labels.dims_of(op.inputs[0])
    channels = 1 if op.get_attr("data_format") == b"NCHW" else -1
    return Labels((dims, (dims[channels],)), (dims,))


def _matmul(op):
    names = ("transpose_a", "transpose_b")
    if op.type != "MatMul":
        names = ("adj_x", "adj_y")
    left, right = ("row", "inner"), ("inner", "column")
    if op.get_attr(names[0]):
        left = left[::-1]
    if op.get_attr(names[1]):
        right = right[::-1]
    return Labels(
        (
            (*labels.dims_from_right(op.inputs[0])[:-2], *left),
            (*labels.dims_from_right(op.inputs[1])[:-2], *right),
        ),
        ((*labels.dims_from_right(op.outputs[0])[:-2], "row", "column"),),
    )


def _einsum(op):
    equation = op.get_attr("equation").decode()
    tensors = [*op.inputs, op.outputs[0]]
    ranks = list(map(labels.rank_of, tensors))
    terms = einsum_labels(equation, ranks)
    if [len(term) for term in terms] != ranks:
        raise NoRule(f"its equation {equation!r} does not fit its operands")
    if any(len(set(term)) < len(term) for term in terms):
        raise NoRule(f"its equation {equation!r} takes a diagonal")
    return Labels(tuple(terms[:-1]), (terms[-1],))


def _reduction(op):
    found = _axis_mixed(op)
    if "keep_dims" in op.node_def.attr and op.get_attr("keep_dims"):
        return found
    # Of dims that are left out nothing is made.
    (made,) = found.outputs
    made = tuple(dim for dim in made if dim is not None)
    return Labels(found.inputs, (made,))


def _axis_mixed(op):
    # Cumsum and its like: the axis is the second input.
    return labels.mixing(op, *labels.constant(op.inputs[1]).reshape([-1]))


def _pool(op):
    dims = labels.dims_of(op.inputs[0])
    ksize, strides = op.get_attr("ksize"), op.get_attr("strides")
    # Explicit padding could be along a dim of no window.
    if len(ksize) != len(dims) or op.get_attr("padding") == b"EXPLICIT":
        raise NoRule("its data format or padding is not supported")
    windows = zip(dims, ksize, strides)
    mixed = [dim for dim, size, stride in windows if (size, stride) != (1, 1)]
    return labels.mixing(op, *mixed)


# The types of operations of each rule.
_TYPES = {
    _axis_mixed: "Cumprod Cumsum CumulativeLogsumexp ReverseV2",
    _bias_add: "BiasAdd",
    _einsum: "Einsum",
    _matmul: "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul",
    _pool: "AvgPool AvgPool3D MaxPool MaxPool3D",
    _reduction: "All Any ArgMax ArgMin Max Mean Min Prod Sum",
    lambda op: labels.mixing(op, -1): "LogSoftmax Softmax TopKV2",
    lambda op: labels.mixing(op, -2, -1): "MatrixBandPart",
    lambda op: labels.mixing(op, 1, 2): (
        "ResizeBicubic ResizeBilinear ResizeNearestNeighbor"
    ),
}
_RULES = moving_rules.RULES | {
    name: rule for rule, names in _TYPES.items() for name in names.split()
}
