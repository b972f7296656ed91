"""Dense and EinsumDense on shards: column- and row-parallel contractions.

With the kernel split along an output dim each rank computes a shard of the
output (column-parallel); split along a contracted dim, each rank computes a
term of the sum that the output is (row-parallel):

    Y = [X A1, X A2]          Y = X1 A1 + X2 A2

Source: Shoeybi et al., Megatron-LM (2019), section 3, figure 3.
"""

import keras
import tensorflow as tf

from tfscale._internals import layers
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.graphs.einsum import einsum_terms
from tfscale.tensor_parallel.elementwise import acts_on_elements
from tfscale.tensor_parallel.rules import rules
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.variables.of_variable import sharding_of

_KINDS = (keras.layers.Dense, keras.layers.EinsumDense)


def make_rule(layer) -> rules.Rule | None:
    """The rule of a Dense or EinsumDense layer with a sharded kernel."""
    if not rules.runs_as(layer, _KINDS, "kernel"):
        return None
    if layer.quantization_mode not in (None, "int8"):
        return None
    dim = sharding_of(layers.weight_of(layer)).model_dim
    if dim is None:
        return None
    inputs, kernel, output = subscripts(layer)
    spec = layer.input_spec
    if "." in inputs[1:] and spec and spec.ndim != len(inputs):
        return None  # Of trailing dims a rule counts one.
    letter = kernel[dim]
    if letter in output and letter not in inputs:
        return _Column(layer, output.index(letter) - len(output), letter)
    if letter in inputs and letter not in output and _can_add_up(layer):
        return _Row(layer, inputs.index(letter) - len(inputs), dim)
    return None


def _can_add_up(layer):
    """Whether inputs are quantized by their largest value, found over ranks."""
    if layer.quantization_mode is None or layer.inputs_quantizer is None:
        return True
    return type(layer.inputs_quantizer) is keras.quantizers.AbsMaxQuantizer


def subscripts(layer) -> tuple[str, str, str]:
    """Letters of input, kernel and output of a Dense or EinsumDense.

    A `.` stands for "..."; dims are counted from the right.
    """
    if isinstance(layer, keras.layers.Dense):
        return ".x", "xy", ".y"
    inputs, kernel, output = einsum_terms(layer.equation)
    return inputs, kernel, output


def _contract(layer, inputs, kernel):
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(inputs, kernel)
    return keras.ops.einsum(layer.equation, inputs, kernel)


class _Column(rules.Rule):
    shares_input = True

    def __init__(self, layer, source_dim, letter):
        super().__init__(layer)
        self.source_dim = source_dim
        self._letter = letter

    def run(self, inputs, training=None):
        layer, inputs = self.layer, sequence.copy_to_region(inputs)
        changed = {"activation": None}
        if layer.quantization_mode is not None:
            scale = layer.kernel_scale
            dim = len(scale.shape) + self.source_dim
            changed["kernel_scale"] = rules.local_shard_along(scale, dim)
        if layer.bias is not None:
            changed["bias"] = self._bias()
        copy = rules.on_shards(layer, **changed)
        return self.activate(rules.call(copy, inputs))

    def _bias(self):
        letters = getattr(self.layer, "bias_axes", "y")
        bias = self.layer.bias
        rank = len(bias.shape)
        # The bias has the dims from the first letter on.
        dim = rank + self.source_dim
        if self._letter in letters and dim >= 0:
            return rules.local_shard_along(bias, dim)
        whole = tf.convert_to_tensor(bias)
        return rank_collectives.copy_to_ranks(whole)


class _Row(rules.Rule):
    def __init__(self, layer, input_dim, kernel_dim):
        super().__init__(layer)
        self._input_dim = input_dim
        self._kernel_dim = kernel_dim
        # None, True or False: inferred, or the user's choice.
        self._comes_sharded = getattr(layer, "input_is_parallel", None)
        if self._comes_sharded is not False:
            self.sink_dim = input_dim

    def whole_size(self):
        return layers.weight_of(self.layer).shape[self._kernel_dim]

    def shard_input(self, inputs):
        if self.sink_dim is None:
            dim = inputs.shape.rank + self._input_dim
            return rank_collectives.scatter_to_ranks(inputs, dim)
        size = inputs.shape[self.sink_dim]
        if self._comes_sharded and size == self.whole_size():
            raise ValueError(
                "The input of a layer with input_is_parallel=True must be "
                f"this rank's shard of {self.whole_size()} entries. Received: "
                f"shape {inputs.shape} in {self.layer.name!r}, which is whole. "
                "Set input_is_parallel=False, or put a `ColumnParallelDense` "
                "with gather_output=False before the layer."
            )
        return inputs if self._comes_sharded else super().shard_input(inputs)

    def scatters(self, args, kwargs):
        layer = self.layer
        if layer.quantization_mode is not None:
            return False
        return layer.activity_regularizer is None and (
            acts_on_elements(layer.activation)
            or layer.activation is keras.activations.softmax
        )

    def run(self, inputs, training=None):
        layer = self.layer
        x, scatters = self.shard_input(inputs), False
        if layer.quantization_mode is None:
            x = _contract(layer, x, rules.on_shards(layer).kernel)
            scatters = sequence.scatters(layer, x)
            x = sequence.sum_over_ranks(layer, x)
        else:
            x = self._int8_sum(x)
        if layer.bias is not None:
            with step_context.within_ranks(gradients_are_partial=scatters):
                x = keras.ops.add(x, layer.bias)
        return x if layer.activation is None else layer.activation(x)

    def _int8_sum(self, inputs):
        """The sum of all ranks' products of integers, and LoRA's product."""
        layer = self.layer
        kernel = rules.shard_of(layers.weight_of(layer))
        scale = tf.convert_to_tensor(layer.kernel_scale)

        @tf.custom_gradient
        def product(inputs):
            quantized, divisor = inputs, scale
            if layer.inputs_quantizer is not None:
                quantized, input_scale = _quantize(layer, inputs)
                # With the dims of the output: the contracted ones are 1.
                ones = keras.ops.ones((1,) * len(kernel.shape), scale.dtype)
                input_scale = _contract(layer, input_scale, ones)
                divisor = keras.ops.multiply(input_scale, scale)
            x = _contract(layer, quantized, kernel)
            x = keras.ops.cast(
                rank_collectives.sum_over_ranks(x), layer.compute_dtype
            )

            def gradient(dy):
                # As for a float kernel; the product is not kept.
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    x = _contract(
                        layer, inputs, keras.ops.cast(kernel, inputs.dtype)
                    )
                return tape.gradient(x, inputs, keras.ops.divide(dy, scale))

            return keras.ops.divide(x, divisor), gradient

        x = product(inputs)
        if layer.lora_enabled:
            # Of whole inputs: floats of ranks add up to other last bits.
            dim = inputs.shape.rank + self._input_dim
            inputs = rank_collectives.gather_from_ranks(inputs, dim)
            a = tf.convert_to_tensor(layer.lora_kernel_a)
            added = keras.ops.matmul(
                _contract(layer, inputs, a), layer.lora_kernel_b
            )
            scaling = layer.lora_alpha / layer.lora_rank
            x = keras.ops.cast(
                keras.ops.add(x, scaling * added), layer.compute_dtype
            )
        return x


def _quantize(layer, x):
    """This rank's shard of an input, quantized as by `AbsMaxQuantizer`."""
    quantizer = layer.inputs_quantizer
    letters, _, output = subscripts(layer)
    axis = tuple(
        dim - len(letters)
        for dim, letter in enumerate(letters)
        if letter not in output
    )
    largest = rank_collectives.max_over_ranks(
        keras.ops.max(keras.ops.abs(x), axis=axis, keepdims=True)
    )
    least, most = quantizer.value_range
    scale = keras.ops.divide(most, keras.ops.add(largest, quantizer.epsilon))
    scale = keras.ops.cast(scale, x.dtype)
    x = keras.ops.clip(
        keras.ops.round(keras.ops.multiply(x, scale)), least, most
    )
    return keras.ops.cast(x, quantizer.output_dtype), scale
