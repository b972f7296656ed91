"""Dense and EinsumDense as the products that they are."""

import dataclasses
import math

import keras

from tfscale.tensor_parallel import elementwise
from tfscale.tensor_parallel.rules.dense_rules import subscripts


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A Dense or EinsumDense: which dims of its kernel are in- and outputs.

    Attributes:
        layer: The layer.
        kernel: Its kernel.
        inputs: Dims of the kernel that are contracted, in the order in which
            the input has them.
        outputs: The other dims, in the order in which the output has them.
        bias: Its bias, or None.
        bias_dim: The dim of the bias that belongs to the first of `outputs`,
            or None.
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
        """Whether it is what a Dense is."""
        return len(self.inputs) == len(self.outputs) == 1

    @property
    def is_elementwise(self):
        """Whether each unit can be computed without the other ones."""
        activation = getattr(self.layer, "activation", None)
        return elementwise.acts_on_elements(activation)


def projection_of(layer) -> Projection | None:
    """What a layer's kernel does, if it is a plain matrix or tensor product.

    Args:
        layer: Any Keras layer.

    Returns:
        None if it is no Dense or EinsumDense, if it is quantized, or if its
        equation is no product of that kind.
    """
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    if not isinstance(layer, kinds) or layer.quantization_mode:
        return None
    weights = {v.name: v for v in layer.weights}
    if "kernel" not in weights:
        return None
    kernel, bias = weights["kernel"], weights.get("bias")
    # "abc,cde->abde": "c" is contracted, "d" and "e" are new.
    taken, own, made = (x.strip(".") for x in subscripts(layer))
    if not (taken + own + made).isalpha():
        return None
    inputs = [own.index(x) for x in taken if x in own]
    outputs = [own.index(x) for x in made if x in own]
    # A letter in all three is a product for each entry of that dim.
    if not inputs or not outputs or set(inputs) & set(outputs):
        return None
    bias_dim = None
    first, axes = own[outputs[0]], getattr(layer, "bias_axes", made)
    if bias is not None and first in axes:
        # The bias begins with the first dim of the output that it varies in.
        start = min(made.index(x) for x in axes)
        bias_dim = made.index(first) - start
    return Projection(
        layer, kernel, tuple(inputs), tuple(outputs), bias, bias_dim
    )
