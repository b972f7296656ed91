"""A metric of a batch in parts: on replicas, and in microbatches."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale._internals import layers
from tfscale._internals import symbols
from tfscale.step import step_context
from tfscale.step.checks import metric_trial


class MeshMetric(in_place.Mixin):
    """A metric whose results are known as such among what a step returns."""

    def result(self):
        """See `keras.Metric.result`; in replica context of all replicas."""
        step = step_context.current()
        if step.batch_shard_in_graph is None:
            result = super().result()
        else:
            result = step.batch_shard.metrics_of_all(super().result)
        if step.gradient_capture is not None:
            values = keras.tree.flatten(result)
            step.gradient_capture.results += [
                (x, self, i) for i, x in enumerate(values)
            ]
        return result


class ReplicatedMetric(in_place.Mixin):
    """A custom metric on replicas, tried before its first update."""

    def update_state(self, *args, **kwargs):
        """See `keras.Metric.update_state`; refuses what is no sum."""
        # Replicas note moments; a user's own call is no step.
        if step_context.current().moments is not None:
            metric_trial.check(self, args, kwargs)
        return super().update_state(*args, **kwargs)


class DividedMetric(in_place.Mixin):
    """A custom metric in microbatches, tried before its first update."""

    def update_state(self, *args, **kwargs):
        """See `keras.Metric.update_state`; warns of what a division changes."""
        if step_context.current().batch_shard is not None:
            metric_trial.check_divided(self, args, kwargs)
        return super().update_state(*args, **kwargs)


class FunctionMetric(DividedMetric):
    """A metric made of a function, of which Keras takes the mean of calls.

    A number for each row or element counts as one, if no mask leaves it out. A
    single number, which on one device is of the whole batch, counts by the rows
    that it is of.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        """See `keras.Metric.update_state`."""
        shard = step_context.current().batch_shard_in_graph
        if shard is None or sample_weight is not None:
            return super().update_state(y_true, y_pred, sample_weight)
        metric_trial.check_divided(self, (y_true, y_pred), {})
        value = attributes.metric_function(self)(y_true, y_pred)
        value = tf.cast(tf.convert_to_tensor(value), self.dtype)
        if value.shape.rank == 0:
            sample_weight = tf.cast(shard.share, self.dtype)
            # A replica without rows has no number.
            value = tf.where(sample_weight > 0, value, 0)
        else:
            sample_weight = symbols.apply_mask(
                None, symbols.get_keras_mask(y_pred), self.dtype, "sum"
            )
        return keras.metrics.Mean.update_state(self, value, sample_weight)


def adapt_metrics(
    metrics: Iterable[keras.Metric], are_on_replicas: bool
) -> None:
    """Has metrics tell a step their results, and custom ones be tried.

    They are tried for replicas, or for microbatches only.
    """
    for metric in metrics:
        in_place.put(metric, MeshMetric)
    _adapt_custom(
        metrics, ReplicatedMetric if are_on_replicas else DividedMetric
    )


def _adapt_custom(metrics, mixin):
    for metric in metrics:
        if not layers.is_of_keras(metric.__class__.update_state):
            in_place.put(metric, mixin)
            continue
        if _is_of_function(metric):
            in_place.put(metric, FunctionMetric)
        # Metrics given to `compile` are inside one of Keras.
        _adapt_custom(getattr(metric, "metrics", ()), mixin)


def _is_of_function(metric):
    """Whether it is made of a function, and of no class of Keras."""
    wrapper, kind = keras.metrics.MeanMetricWrapper, metric.__class__
    return kind is wrapper or (
        issubclass(kind, wrapper) and not layers.is_of_keras(kind)
    )
