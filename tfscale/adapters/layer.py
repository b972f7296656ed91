"""A layer of a mesh: runs on shards of weights, sequences or batches."""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale._internals import releases
from tfscale.context import step_context
from tfscale.graphs.with_gradient import with_gradient


class MeshLayer(in_place.Mixin):
    """Members that are put before the class of a layer.

    Attributes:
        sharded_call: The `ShardedCall` of a layer with sharded variables.
        sequence_boundary: The `Boundary` around `call`, where a plan shards
            sequences.
        mask_boundary: The boundary around a method that computes a mask from
            the shapes of its inputs, which are whole, while `call` has shards.
    """

    sharded_call: Any = None
    sequence_boundary: Any = None
    mask_boundary: Any = None

    def call(self, *args, **kwargs):
        """See `keras.Layer`."""
        return self._call_on_ranks(super().call, args, kwargs)

    def quantized_call(self, *args, **kwargs):
        """See `keras.Layer`, which calls it in place of `call`."""
        return self._call_on_ranks(super().quantized_call, args, kwargs)

    def _call_on_ranks(self, call, args, kwargs):
        if self.sharded_call is not None:
            call = functools.partial(self.sharded_call.run, call)
        return _within(self.sequence_boundary, call, args, kwargs)

    def _compute_attention_mask(self, *args, **kwargs):
        make_mask = super()._compute_attention_mask
        return _within(self.mask_boundary, make_mask, args, kwargs)

    def _compute_self_attention_mask(self, *args, **kwargs):
        make_mask = super()._compute_self_attention_mask
        return _within(self.mask_boundary, make_mask, args, kwargs)

    @property
    def quantize(self) -> Any:
        """See `keras.Layer`.

        A property, because only a property precedes attributes of an instance,
        which Keras 3.15 sets.
        """
        is_model = isinstance(self, keras.Model)
        if not is_model and releases.is_quantized_as_it_is(self):
            return self._quantize
        return releases.quantize_of(self, super().quantize)  # type: ignore[misc]

    def _quantize(self, mode=None, config=None, **kwargs):
        """Keras' method, in the scope, without its check of the layer's class.

        Custom layers, which have no such method, do not come here.
        """
        mode = mode or getattr(config, "mode", None)
        if self.sharded_call is not None and mode != "int8":
            raise ValueError(
                "Layers on model ranks can be quantized to int8 only. "
                f"Received: `quantize` with mode={mode!r}, for {self.path!r} "
                f"of type {type(self).__name__}. To use that mode, load the "
                "trained weights into a plain model outside of the strategy's "
                "scope, quantize and save it, and load the file in the scope. "
                "Earlier layers may already be quantized: discard this model."
            )
        quantize = releases.quantize_of(self, super().quantize)
        strategy = attributes.value_of(self.weights[0]).distribute_strategy
        with strategy.scope():
            kwargs = {**kwargs, "type_check": False}
            quantize(mode=mode, config=config, **kwargs)


class MeshBatchNormalization(MeshLayer):
    """A BatchNormalization that notes the moments of its inputs."""

    def _moments(self, inputs, mask):
        noted = step_context.current().moments_in_graph
        if noted is None:
            return super()._moments(inputs, mask)
        return noted.moments_of(self, super()._moments, inputs, mask)

    def _update_renorm_statistics(self, mean, variance):
        noted = step_context.current().moments_in_graph
        if noted is None or self.synchronized:
            self.update_moving(mean, variance)

    def update_moving(self, mean, variance):
        """Moving averages, from those in the variables and a batch's."""
        super()._update_renorm_statistics(mean, variance)


class MeshWindowLayer(MeshLayer):
    """A layer that a replica without rows gives a row of zeros.

    TensorFlow's kernels are not written for no rows: in a convolution oneDNN
    returns the shape of the inputs, the gradient of a depthwise kernel is not
    initialized, and the gradient of a maximum ends the process.
    """

    def call(self, inputs, *args, **kwargs):
        """See `keras.Layer`."""
        is_shard = step_context.current().batch_shard is not None
        if inputs.shape[0] or not is_shard:
            return super().call(inputs, *args, **kwargs)
        missing = _missing_rows(inputs)
        inputs = _with_rows(inputs, missing)
        args, kwargs = tf.nest.map_structure(with_a_row, (args, kwargs))
        outputs = super().call(inputs, *args, **kwargs)
        return tf.nest.map_structure(
            lambda output: _without(missing, output), outputs
        )


class MeshRaggedProduct(MeshLayer):
    """A product of ragged rows, which have no length where there is no row."""

    def call(self, inputs, *args, **kwargs):
        """See `keras.Layer`; a replica without rows has one for the product."""
        is_shard = step_context.current().batch_shard is not None
        is_ragged = isinstance(inputs, tf.RaggedTensor)
        if not (is_shard and is_ragged and inputs.shape.rank == 2):
            return super().call(inputs, *args, **kwargs)
        num_rows = inputs.nrows()
        length = self.get_build_config()["input_shape"][-1]
        row = tf.zeros([tf.maximum(1 - num_rows, 0), length], inputs.dtype)
        inputs = tf.concat([inputs, row], axis=0)
        return super().call(inputs, *args, **kwargs)[:num_rows]


def _within(boundary, method, args, kwargs):
    if boundary is None:
        return method(*args, **kwargs)
    return boundary.run(method, args, kwargs)


# Paddings and sizes are computed as vectors, and gradients are given: those of
# `tf.pad` and `tf.slice` would be 30 more operations, in each layer of each
# replica.


def _missing_rows(tensor):
    """1 for the rows of a tensor that has none, else 0; 0 for other dims."""
    rows = [1] + [0] * (tensor.shape.rank - 1)
    return tf.maximum(tf.constant(rows) - tf.shape(tensor), 0)


def with_a_row(value: Any) -> Any:
    """A tensor that has a row at least; without a copy if it has one."""
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return value
    return _with_rows(value, _missing_rows(value))


def _with_rows(value, missing):
    padded = _resized(_padded, _first_rows, value, missing)
    # Grappler may know that there are no rows, and would drop the padding.
    return tf.ensure_shape(padded, padded.shape)


def _without(missing, output):
    """An output without the missing rows; without a copy if there are none."""
    # Some layers return fewer dims than they are given.
    more = output.shape.rank - missing.shape[0]
    if more:
        missing = tf.pad(missing[: output.shape.rank], [[0, max(more, 0)]])
    return _resized(_first_rows, _padded, output, missing)


def _resized(resize, resize_back, tensor, missing):
    resized = resize(tensor, missing)
    resized.set_shape([None, *tensor.shape[1:]])
    backward = _GRADIENTS[resize_back]
    (resized,) = with_gradient(backward, [resized], [tensor, missing])
    return resized


def _padded(tensor, missing):
    return tf.pad(tensor, tf.stack([tf.zeros_like(missing), missing], axis=1))


def _first_rows(tensor, missing):
    # -1 is all; there is one row where one is missing.
    return tf.slice(tensor, tf.zeros_like(missing), missing - 1)


def _gradient(resize_back, gradients, inputs):
    return resize_back(gradients[0], inputs[1]), None


_GRADIENTS = {
    resize: functools.partial(_gradient, resize)
    for resize in (_padded, _first_rows)
}


# Layers that move a window over an image, a line or a film.
_WITH_WINDOWS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
)
_PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)


def adapt_layers(layers: Iterable[keras.Layer]) -> None:
    """Adapts layers that differ on shards of a batch, which may have no row."""
    for layer in layers:
        if isinstance(layer, (keras.layers.BatchNormalization, *_WITH_WINDOWS)):
            adapt_layer(layer)


def adapt_to_data(layers: Iterable[keras.Layer], data: Iterable[Any]) -> None:
    """Adapts layers that differ on ragged tensors, if there are some."""
    if any(isinstance(each, tf.RaggedTensor) for each in data):
        for layer in layers:
            if isinstance(layer, _PRODUCTS):
                in_place.put(layer, MeshRaggedProduct)


def adapt_layer(layer: keras.Layer, **attributes: Any) -> None:
    """Puts the class of this module, or of `model.py`, before a layer's."""
    kind = MeshLayer
    if isinstance(layer, keras.layers.BatchNormalization):
        kind = MeshBatchNormalization
    elif isinstance(layer, _WITH_WINDOWS):
        kind = MeshWindowLayer
    in_place.put(layer, kind, **attributes)
