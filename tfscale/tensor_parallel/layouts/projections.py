"""Dense and EinsumDense as products, and pairs of them."""

import collections
import dataclasses
import math

import keras

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.tensor_parallel import elementwise
from tfscale.tensor_parallel.elementwise import treats_elements_apart
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


class Chains:
    """Which Dense layers of a functional model follow which ones."""

    def __init__(self, graph):
        nodes = attributes.nodes_of(graph)
        self._maker = {id(x): n for n in nodes for x in n.outputs}
        self._users = collections.defaultdict(list)
        for node in nodes:
            for x in node.input_tensors:
                self._users[id(x)].append(node)
        # An output of the model is used by its caller.
        for x in graph.outputs:
            self._users[id(x)].append(None)
        calls = collections.Counter(id(n.operation) for n in nodes)
        self._matrices = {
            id(n): p
            for n in nodes
            if calls[id(n.operation)] == 1
            and (p := projection_of(n.operation)) is not None
            and p.is_matrix
        }
        self._nodes = nodes

    def pairs(self):
        """Yields `(ups, down)`: all inputs of `down` come from `ups`."""
        for node in self._nodes:
            if id(node) in self._matrices:
                path = [node]
                ups = self._sources(node.input_tensors, path)
                down = self._matrices[id(node)]
                fits = ups and {up.sizes[1] for up in ups} == {down.sizes[0]}
                if fits and self._is_private(path):
                    yield ups, down

    def _sources(self, tensors, path):
        """The Dense layers before `tensors`, or None if there are others."""
        found = []
        for x in tensors:
            node = self._maker.get(id(x))
            if node is None:
                return None
            if node in path:
                continue
            path.append(node)
            if id(node) in self._matrices:
                sources = [self._matrices[id(node)]]
                if not sources[0].is_elementwise:
                    return None
            elif treats_elements_apart(node.operation):
                sources = self._sources(node.input_tensors, path)
            else:
                return None
            if sources is None:
                return None
            found += sources
        return found

    def _is_private(self, path):
        """Whether all tensors on the way to `path[0]` are used there only."""
        return all(
            user in path
            for node in path[1:]
            for x in node.outputs
            for user in self._users[id(x)]
        )


def functional_of(layer):
    """The functional model that a call of `layer` runs, or None."""
    kind = layer.__class__
    if isinstance(layer, keras.Sequential):
        overrides_call = kind.call is not keras.Sequential.call
        return None if overrides_call else attributes.functional_in(layer)
    is_functional = isinstance(layer, symbols.Functional)
    if is_functional and kind.call is symbols.Functional.call:
        return layer
    return None
