"""Counts the FLOPs of a traced function by reading its graph.

`training_flops` counts those of a model, forward and backward.

A table of formulas would miss layers of `keras_hub` and of users. In a graph
the work follows from the shapes of a few operations: matrix products, einsums
and convolutions, in functions and loops.
"""

import itertools
import math
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import walks
from tfscale.graphs.einsum import einsum_labels


def training_flops(model: keras.Model, inputs: Any) -> int:
    """FLOPs of forward and backward of a built model, for one example.

    They are those of products, einsums and convolutions: outputs and gradients
    of trainable weights are traced, without the loss. Weights are arguments of
    the trace, so that it is the same whatever devices they are on.

    Args:
        model: A model whose `call` computes what is trained.
        inputs: A structure of `tf.TensorSpec`s that are known but for the
            rows, the first dim.

    Raises:
        ValueError: If a product is of tensors of an unknown rank.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> training_flops(model, tf.TensorSpec((None, 8), "float32"))
    128
    """
    variables = model.trainable_variables

    def gradients(weights, inputs):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            with keras.StatelessScope(list(zip(variables, weights))):
                outputs = model(inputs, training=True)
            outputs = [x for x in tf.nest.flatten(outputs) if _is_float(x)]
        return outputs, tape.gradient(outputs, weights)

    return _products(
        tf.function(gradients, autograph=False).get_concrete_function(
            [tf.TensorSpec(v.shape, v.dtype) for v in variables],
            tf.nest.map_structure(
                lambda x: tf.TensorSpec((1, *x.shape[1:]), x.dtype), inputs
            ),
        )
    )


def function_flops(function: tf.types.experimental.ConcreteFunction) -> int:
    """Forward FLOPs of a traced function.

    A multiplication with an addition counts 2: matrix products, einsums and
    convolutions are counted exactly, also inside of nested models, RNN loops
    (times the sequence length) and branches (the most expensive one). Each
    element of the outputs adds 1, for a bias, an activation or a look-up.

    Example: 8 x 4 weights for each of 16 positions, and 64 results.

    >>> function = tf.function(lambda x: tf.matmul(x, tf.ones((8, 4))))
    >>> spec = tf.TensorSpec((1, 16, 8))
    >>> function_flops(function.get_concrete_function(spec))
    1088
    """
    return _products(function) + sum(
        _size(output.shape.as_proto()) for output in _outputs(function)
    )


def _outputs(function):
    # A layer may return None although `compute_output_shape` has a shape.
    flat = keras.tree.flatten(function.structured_outputs)
    return [output for output in flat if output is not None]


def _products(function) -> int:
    graph = function.graph.as_graph_def(add_shapes=True)
    library = {f.signature.name: f for f in graph.library.function}
    roots = [output.op.name for output in _outputs(function)]
    return 2 * _multiply_adds(graph.node, roots, {}, library)


def _is_float(x) -> bool:
    return tf.is_tensor(x) and x.dtype.is_floating


def _multiply_adds(nodes, roots, shapes_of, library) -> int:
    # Only what `roots` need counts: Keras calls RNN cells once for a shape.
    by_name = {node.name: node for node in nodes}
    shapes_of = shapes_of | {
        node.name: node.attr[attributes.OUTPUT_SHAPES].list.shape
        for node in nodes
    }

    def inputs(node):
        # "node", "node:1" in a graph, "node:output:1" in a function.
        names = [name.split(":") for name in node.input if name[0] != "^"]
        return [
            shapes_of[source][
                sum(map(int, where[-1:]))
                + sum(_outputs_before(by_name[source], x) for x in where[:-1])
            ]
            for source, *where in names
        ]

    def known(names):
        plain = [name.lstrip("^").split(":")[0] for name in names]
        return [name for name in plain if name in by_name]

    def iterations(node):
        # Keras gives a loop its length as the maximum of a constant.
        limit = by_name.get(node.input[1].split(":")[0])
        while limit is not None and limit.op in ("Identity", "Max"):
            limit = by_name.get(limit.input[0].split(":")[0])
        if limit is None or limit.op != "Const":
            return 1
        return max(int(tf.make_ndarray(limit.attr["value"].tensor)), 1)

    total = 0
    needed = walks.reachable(known(roots), lambda x: known(by_name[x].input))
    for node in (by_name[name] for name in needed):
        if node.op in _COUNTERS:
            output = shapes_of[node.name][0]
            shapes = (*inputs(node), output)
            # A popped list has no shapes.
            if node.op != "Einsum" and not all(shape.dim for shape in shapes):
                raise ValueError(
                    "FLOPs are known where the ranks of tensors are. Received: "
                    f"{node.op} {node.name!r} of a tensor of unknown rank"
                )
            total += _COUNTERS[node.op](node, inputs(node), output)
        elif node.op in _LOOPS:
            body = library[node.attr["body"].func.name]
            total += iterations(node) * _function_multiply_adds(body, library)
        else:
            called = walks.called_functions([node], library)
            total += max(
                (_function_multiply_adds(library[f], library) for f in called),
                default=0,
            )
    return total


def _outputs_before(node, name) -> int:
    """Tensors of a node's outputs before the output of a name."""
    graph = tf.compat.v1.get_default_graph()
    outputs = graph.op_def_for_type(node.op).output_arg
    before = itertools.takewhile(lambda output: output.name != name, outputs)
    return sum(
        node.attr[output.number_attr].i
        if output.number_attr
        else len(node.attr[output.type_list_attr].list.type)
        if output.type_list_attr
        else 1
        for output in before
    )


def _function_multiply_adds(function, library) -> int:
    arguments = {
        argument.name: function.arg_attr[index]
        .attr[attributes.OUTPUT_SHAPES]
        .list.shape
        for index, argument in enumerate(function.signature.input_arg)
    }
    return _multiply_adds(
        function.node_def, function.ret.values(), arguments, library
    )


def _dims(shape) -> list[int]:
    return [dim.size if dim.size >= 0 else 1 for dim in shape.dim]


def _size(shape) -> int:
    return math.prod(_dims(shape))


def _matmul(node, inputs, output):
    transposed = node.attr["transpose_a"].b or node.attr["adj_x"].b
    return _size(output) * _dims(inputs[0])[-2 if transposed else -1]


def _einsum(node, inputs, output):
    # One multiply-add for each combination of indices, summed over or not.
    if len(inputs) == 1:
        return 0
    equation, dims = node.attr["equation"].s.decode(), list(map(_dims, inputs))
    terms = einsum_labels(equation, [len(sizes) for sizes in dims])
    sizes = {}
    for labels, of_operand in zip(terms, dims):
        for label, dim in zip(labels, of_operand, strict=True):
            sizes[label] = max(sizes.get(label, 1), dim)
    return math.prod(sizes.values())


def _convolution(node, inputs, output):
    # A convolution and its two gradients multiply equally often. Inputs of a
    # gradient: what was convolved, the filter, the gradient of the result; what
    # it is the gradient of is an output, and its input only a shape.
    *_, gradient = node.op.partition("Backprop")
    result = inputs[2] if gradient else output
    kernel = output if gradient.startswith("Filter") else inputs[1]
    # Spatial dims, channels of a group, filters; or a filter for each channel.
    num_read = -2 if node.op.startswith("Depthwise") else -1
    return _size(result) * math.prod(_dims(kernel)[:num_read])


def _cudnn_rnn(node, inputs, output):
    # Inputs: sequence (time, batch, dim), state, cell state, all weights in
    # one vector; its biases (two for each gate) multiply nothing.
    gates = {b"lstm": 4, b"gru": 3}.get(node.attr["rnn_mode"].s, 1)
    biases = 2 * gates * _dims(inputs[1])[-1]
    time, batch, _ = _dims(inputs[0])
    return time * batch * (_size(inputs[3]) - biases)


def _gradient_of_cudnn_rnn(node, inputs, output):
    # Of its inputs, which it begins with, and of its weights.
    return 2 * _cudnn_rnn(node, inputs, output)


_LOOPS = ("While", "StatelessWhile")
_COUNTERS = {
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Conv": _convolution,
    "Conv2D": _convolution,
    "Conv2DBackpropFilter": _convolution,
    "Conv2DBackpropInput": _convolution,
    "Conv3D": _convolution,
    "Conv3DBackpropFilterV2": _convolution,
    "Conv3DBackpropInputV2": _convolution,
    "CudnnRNNBackpropV2": _gradient_of_cudnn_rnn,
    "CudnnRNNBackpropV3": _gradient_of_cudnn_rnn,
    "CudnnRNNV2": _cudnn_rnn,
    "CudnnRNNV3": _cudnn_rnn,
    "DepthwiseConv2dNative": _convolution,
    "DepthwiseConv2dNativeBackpropFilter": _convolution,
    "DepthwiseConv2dNativeBackpropInput": _convolution,
    "Einsum": _einsum,
    "MatMul": _matmul,
}
