"""Moving statistics of BatchNormalization: of the whole batch, once a step.

Each microbatch is normalised by its own mean and variance (Huang et al. 2019,
section 2.2), but the moving averages that inference uses get those of the
whole batch, as on one device. With p_m the share of microbatch m and k the
momentum, each microbatch alone would make of the moving averages a and b

    a_m = k a + (1 - k) mean_m        b_m = k b + (1 - k) var_m

and the whole batch, whose variance is that within microbatches plus that of
their means, makes of them

    a' = sum_m p_m a_m
    b' = sum_m p_m b_m + sum_m p_m (a_m - a')^2 / (1 - k)

or, with k = 1, what they were.
"""

import dataclasses

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.pipeline.tracing import keys


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The moving averages of one BatchNormalization layer, by number."""

    mean: int
    variance: int
    momentum: float


def find_statistics(calls, numbers: dict[int, int]) -> list[Statistics]:
    """The layers whose moving averages are made of the whole batch.

    A layer that is called twice in a step updates them twice, and one with
    renormalisation uses them to normalise: their averages go from microbatch
    to microbatch, like any other state.
    """
    found = {}
    for call in calls:
        for layer in _batch_normalizations(call.operation):
            found.setdefault(id(layer), []).append(layer)
    return [
        Statistics(
            numbers[id(layer.moving_mean)],
            numbers[id(layer.moving_variance)],
            layer.momentum,
        )
        for (layer, *more) in found.values()
        if not more and not layer.renorm
    ]


def check_synchronized(calls) -> None:
    """Refuses BatchNormalization(synchronized=True).

    Raises:
        ValueError: If there is such a layer: microbatches run one after the
            other, so the statistics of all cannot be there for the first.
    """
    for call in calls:
        for layer in _batch_normalizations(call.operation):
            if layer.synchronized:
                raise ValueError(
                    "A pipeline normalises every microbatch by itself. "
                    f"Received: layer {layer.name!r} with synchronized=True. "
                    "Use synchronized=False, or a normalisation that does not "
                    "depend on the batch (LayerNormalization, "
                    "GroupNormalization)."
                )


def record_weights(call, values, numbers, results) -> None:
    """Adds to `results` how many elements of the input count, if masked."""
    layer = call.operation
    if isinstance(layer, keras.layers.BatchNormalization):
        mask = _internals.get_keras_mask(values[call.inputs[0]])
        if mask is not None:
            results[keys.StatisticsWeight(numbers[id(layer.moving_mean)])] = (
                tf.reduce_sum(tf.cast(mask, tf.float32))
            )


def combine(statistics, means, variances, weights, all_sum):
    """Moving averages after a step, from those that each microbatch made.

    Args:
        statistics: The layer's `Statistics`.
        means: One tensor of shape `(channels,)` per microbatch, made by that
            microbatch alone from the moving averages before the step.
        variances: Likewise.
        weights: A scalar per microbatch: how many elements it has.
        all_sum: Sums a tensor over the replicas.

    Returns:
        The new moving mean and variance.
    """
    weights = [tf.cast(weight, means[0].dtype) for weight in weights]
    total = all_sum(tf.add_n(weights))

    def average(tensors):
        # An empty microbatch has a mean of 0 / 0 and weight 0.
        parts = [
            tf.math.multiply_no_nan(tensor, weight)
            for tensor, weight in zip(tensors, weights)
        ]
        return all_sum(tf.add_n(parts)) / total

    mean = average(means)
    between = average([tf.square(m - mean) for m in means])
    spread = between / (1.0 - statistics.momentum)
    return mean, average(variances) + spread


def _batch_normalizations(operation):
    if not isinstance(operation, keras.layers.Layer):
        return []
    return [
        layer
        for layer in _internals.flatten_layers(operation)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
