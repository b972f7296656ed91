"""A metric on replicas, tried before its first update, and in microbatches."""

from collections.abc import Iterable

import keras

from tfscale._internals import in_place
from tfscale._internals import layers
from tfscale.step import step_context
from tfscale.step.checks import metric_trial


class MeshMetric(in_place.Mixin):
    """The class that is put before the class of a custom metric."""

    def update_state(self, *args, **kwargs):
        """See `keras.Metric.update_state`; refuses what is no sum."""
        update_state = super().update_state
        # Replicas note moments; a user's own call is no step.
        if step_context.current().moments is not None:
            metric_trial.check(self, update_state, args, kwargs)
        return update_state(*args, **kwargs)


class AccumulatedMetric(in_place.Mixin):
    """A metric whose results are known as such among what a step returns."""

    def result(self):
        """See `keras.Metric.result`."""
        result = super().result()
        capture = step_context.current().gradient_capture
        if capture is not None:
            capture.results += keras.tree.flatten(result)
        return result


def adapt_accumulated_metrics(metrics: Iterable[keras.Metric]) -> None:
    """Has metrics tell the capture of a microbatch their results."""
    for metric in metrics:
        in_place.put(metric, AccumulatedMetric)


def adapt_metrics(metrics: Iterable[keras.Metric]) -> None:
    """Has custom metrics be tried before replicas update them."""
    for metric in _custom(metrics):
        in_place.put(metric, MeshMetric)


def _custom(metrics):
    """The metrics whose `update_state` is not of Keras."""
    for metric in metrics:
        if layers.is_of_keras(metric.__class__.update_state):
            # Metrics given to `compile` are inside one of Keras.
            yield from _custom(getattr(metric, "metrics", ()))
        else:
            yield metric
