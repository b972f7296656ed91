"""Convolutions and normalizations on shards of their channels.

A convolution whose kernel is split along its output channels computes a shard
of them, one that is split along its input channels a term of their sum. A
depthwise convolution and a BatchNormalization treat each channel separately. A
LayerNormalization needs mean and variance of all channels, and sums over ranks
for them.
"""

import abc

import keras
import tensorflow as tf

from tfscale._internals import instances
from tfscale._internals import layers
from tfscale.collectives import rank_collectives
from tfscale.tensor_parallel.elementwise import acts_on_elements
from tfscale.tensor_parallel.rules import rules
from tfscale.variables.of_variable import sharding_of

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_METHODS = layers.private_methods(keras.layers.BatchNormalization)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)


def make_rule(layer) -> rules.Rule | None:
    """The rule of a layer that has sharded channels."""
    if rules.runs_as(layer, _CONVOLUTIONS, "kernel", "convolution_op"):
        kernel = layers.weight_of(layer)
        dim = sharding_of(kernel).model_dim
        if layer.groups == 1 and dim == len(kernel.shape) - 1:
            return _OutputChannels(layer)
        if layer.groups == 1 and dim == len(kernel.shape) - 2:
            return _InputChannels(layer)
    elif rules.runs_as(layer, _DEPTHWISE):
        dim = sharding_of(layer.kernel).model_dim
        is_apart = acts_on_elements(layer.activation)
        if dim == len(layer.kernel.shape) - 2 and is_apart:
            return _Depthwise(layer)
    elif any(sharding_of(v).model_dim != 0 for v in layer.weights):
        return None
    elif rules.runs_as(layer, [keras.layers.BatchNormalization], *_METHODS):
        if layer.axis == -1 and not (layer.renorm or layer.synchronized):
            return _BatchNormalization(layer)
    elif rules.runs_as(
        layer, [keras.layers.LayerNormalization]
    ) and layer.axis in (-1, [-1]):
        return _LayerNormalization(layer)
    return None


def _channel_dim(layer):
    if layer.data_format == "channels_last":
        return -1
    return -layer.rank - 1


class _OutputChannels(rules.Rule):
    def __init__(self, layer):
        super().__init__(layer)
        self.source_dim = _channel_dim(layer)

    def run(self, inputs):
        layer, changed = self.layer, {"activation": None}
        if layer.use_bias:
            bias = rules.local_shard_along(layer.bias, 0)
            changed |= {"bias": bias, "filters": bias.shape[0]}
        copy = rules.on_shards(layer, **changed)
        return self.activate(
            rules.call(copy, rank_collectives.copy_to_ranks(inputs))
        )


class _InputChannels(rules.Rule):
    def __init__(self, layer):
        super().__init__(layer)
        self.sink_dim = _channel_dim(layer)

    def whole_size(self):
        return layers.weight_of(self.layer).shape[-2]

    def run(self, inputs):
        layer = self.layer
        copy = rules.on_shards(layer, use_bias=False, activation=None)
        x = rank_collectives.reduce_from_ranks(
            rules.call(copy, self.shard_input(inputs))
        )
        if layer.use_bias:
            shape = [1] * x.shape.rank
            shape[_channel_dim(layer)] = -1
            x = keras.ops.add(x, keras.ops.reshape(layer.bias, shape))
        return x if layer.activation is None else layer.activation(x)


class _Local(rules.Rule):
    """Treats each channel separately: sharded if its input is."""

    propagates = True
    source_dim = sink_dim = -1

    def run(self, inputs, *args, **kwargs):
        if self.is_sharded(inputs):
            return self.run_locally(inputs, *args, **kwargs)
        # Its variables are small, so they are gathered.
        return self.layer.__class__.call(self.layer, inputs, *args, **kwargs)

    @abc.abstractmethod
    def run_locally(self, inputs, *args, **kwargs):
        """Runs the layer on this rank's channels."""


class _Depthwise(_Local):
    def __init__(self, layer):
        super().__init__(layer)
        self.source_dim = self.sink_dim = _channel_dim(layer)

    def whole_size(self):
        return self.layer.kernel.shape[-2]

    def run_locally(self, inputs):
        layer, changed = self.layer, {}
        if layer.use_bias:
            changed["bias"] = rules.local_shard_along(layer.bias, 0)
        kernel = rules.shard_of(layer.kernel)
        copy = instances.altered(layer, kernel=kernel, **changed)
        return rules.call(copy, inputs)


class _BatchNormalization(_Local):
    def whole_size(self):
        return self.layer.moving_mean.shape[0]

    def run_locally(self, inputs, training=None, mask=None):
        layer = self.layer
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        old = layer.moving_mean, layer.moving_variance
        moments = [tf.cast(rules.shard_of(v), x.dtype) for v in old]
        if training and layer.trainable:
            moving, moments = moments, layers.moments(layer, x, mask)
            for variable, before, new in zip(old, moving, moments):
                rules.assign_shard(
                    variable,
                    before * layer.momentum + new * (1.0 - layer.momentum),
                )
        gamma, beta = (
            None if v is None else tf.cast(rules.shard_of(v), x.dtype)
            for v in (layer.gamma, layer.beta)
        )
        x = keras.ops.batch_normalization(
            x, *moments, layer.axis, beta, gamma, layer.epsilon
        )
        return tf.cast(x, layer.compute_dtype)


class _LayerNormalization(_Local):
    collectives = ("all-reduce of sums for mean and variance",)

    def whole_size(self):
        return self.layer.weights[0].shape[0]

    def run_locally(self, inputs):
        layer = self.layer
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        size = tf.cast(self.whole_size(), x.dtype)

        def mean(x):
            total = tf.reduce_sum(x, axis=-1, keepdims=True)
            return rank_collectives.total_over_ranks(total) / size

        centered = x - mean(x)
        inverse = tf.math.rsqrt(mean(tf.square(centered)) + layer.epsilon)
        # Keras scales by the deviation from the mean, and leaves the mean.
        x = inverse * (x if layer.rms_scaling else centered)
        if layer.gamma is not None:
            x *= tf.cast(rules.shard_of(layer.gamma), x.dtype)
        if layer.beta is not None:
            x += tf.cast(rules.shard_of(layer.beta), x.dtype)
        return tf.cast(x, layer.compute_dtype)
