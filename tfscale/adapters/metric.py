"""A metric on replicas, tried before its first update, and in microbatches."""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator

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


@contextlib.contextmanager
def telling_results(metrics: Iterable[keras.Metric]) -> Iterator[None]:
    """Within it, metrics tell the capture of a microbatch their results."""
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(in_place.putting(metric, AccumulatedMetric))
        yield


@contextlib.contextmanager
def adapted_metrics(metrics: Iterable[keras.Metric]) -> Iterator[None]:
    """Within it, custom metrics are tried before they are updated."""
    with contextlib.ExitStack() as stack:
        for metric in _custom(metrics):
            stack.enter_context(in_place.putting(metric, MeshMetric))
        yield


def _custom(metrics):
    """The metrics whose `update_state` is not of Keras."""
    for metric in metrics:
        if layers.is_of_keras(metric.__class__.update_state):
            # Metrics given to `compile` are inside one of Keras.
            yield from _custom(getattr(metric, "metrics", ()))
        else:
            yield metric
