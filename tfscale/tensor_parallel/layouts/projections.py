"""Dense and EinsumDense as products, and pairs of them."""

import collections
import dataclasses
import math
from collections.abc import Iterator

import keras

from tfscale._internals import attributes
from tfscale.tensor_parallel import elementwise
from tfscale.tensor_parallel.rules.dense_rules import subscripts


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A Dense or EinsumDense as a product.

    Attributes:
        inputs: Contracted dims of the kernel, in the order of the input.
        outputs: The other dims, in the order of the output.
        bias_dim: The dim of the bias that belongs to the first of `outputs`.
    """

    layer: keras.Layer
    kernel: keras.Variable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bias: keras.Variable | None
    bias_dim: int | None

    @property
    def sizes(self):
        """Sizes of all inputs and of all outputs, like (512, 2048)."""
        shape = self.kernel.shape
        return tuple(
            math.prod(shape[dim] for dim in dims)
            for dims in (self.inputs, self.outputs)
        )

    @property
    def is_matrix(self):
        """Whether it is a product by a matrix, as of a Dense."""
        return len(self.inputs) == len(self.outputs) == 1

    @property
    def is_elementwise(self):
        """Whether each unit can be computed without the other ones."""
        activation = getattr(self.layer, "activation", None)
        return elementwise.acts_on_elements(activation)


def projection_of(layer) -> Projection | None:
    """The product of a layer's kernel; None if it is no Dense or EinsumDense.

    It is None too if the layer is quantized, or no plain product.
    """
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    if not isinstance(layer, kinds) or layer.quantization_mode:
        return None
    weights = {v.name: v for v in layer.weights}
    if "kernel" not in weights:
        return None
    kernel, bias = weights["kernel"], weights.get("bias")
    # "abc,cde->abde": "c" is contracted, "d" and "e" are new.
    of_input, of_kernel, of_output = (x.strip(".") for x in subscripts(layer))
    if not (of_input + of_kernel + of_output).isalpha():
        return None
    inputs = [of_kernel.index(x) for x in of_input if x in of_kernel]
    outputs = [of_kernel.index(x) for x in of_output if x in of_kernel]
    # A letter in all three is a product for each entry of that dim.
    if not inputs or not outputs or set(inputs) & set(outputs):
        return None
    bias_dim = None
    first = of_kernel[outputs[0]]
    axes = getattr(layer, "bias_axes", of_output)
    if bias is not None and first in axes:
        # The bias begins with the first dim of the output that it varies in.
        start = min(of_output.index(x) for x in axes)
        bias_dim = of_output.index(first) - start
    return Projection(
        layer, kernel, tuple(inputs), tuple(outputs), bias, bias_dim
    )


def dense_pairs(graph) -> Iterator[tuple[list[Projection], Projection]]:
    """Dense layers of a functional model, and the one that takes all of them.

    Between them are elementwise layers only, of no other use.
    """
    nodes = attributes.nodes_of(graph)
    maker = {id(x): n for n in nodes for x in n.outputs}
    users = collections.defaultdict(list)
    for x in graph.outputs:
        users[id(x)].append(None)  # the caller
    for node in nodes:
        for x in node.input_tensors:
            users[id(x)].append(node)
    calls = collections.Counter(id(n.operation) for n in nodes)
    matrices = {
        id(n): p
        for n in nodes
        if calls[id(n.operation)] == 1
        and (p := projection_of(n.operation)) is not None
        and p.is_matrix
    }

    def sources(tensors, path):
        """The Dense layers before `tensors`, or None if there are others."""
        found = []
        for x in tensors:
            node = maker.get(id(x))
            if node is None:
                return None
            if node in path:
                continue
            path.append(node)
            matrix = matrices.get(id(node))
            if matrix is not None:
                before = [matrix] if matrix.is_elementwise else None
            elif elementwise.treats_elements_apart(node.operation):
                before = sources(node.input_tensors, path)
            else:
                before = None
            if before is None:
                return None
            found += before
        return found

    for node in nodes:
        down = matrices.get(id(node))
        if down is None:
            continue
        path = [node]
        ups = sources(node.input_tensors, path)
        is_private = all(
            user in path
            for between in path[1:]
            for x in between.outputs
            for user in users[id(x)]
        )
        if ups and is_private and {p.sizes[1] for p in ups} == {down.sizes[0]}:
            yield ups, down
