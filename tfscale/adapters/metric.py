"""A metric on replicas, which is tried before its first update."""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator

import keras

from tfscale import in_place
from tfscale._internals import layers
from tfscale.whole_batch import metric_trial


class MeshMetric(in_place.Mixin):
    """What is put in front of the class of a metric of a user's own."""

    def update_state(self, *args, **kwargs):
        """See `keras.Metric.update_state`; refuses what is no sum."""
        update_state = super().update_state
        metric_trial.check(self, update_state, args, kwargs)
        return update_state(*args, **kwargs)


@contextlib.contextmanager
def adapted_metrics(metrics: Iterable[keras.Metric]) -> Iterator[None]:
    """Within it, metrics of users' own are tried before they are updated."""
    with contextlib.ExitStack() as stack:
        for metric in _custom(metrics):
            stack.enter_context(in_place.putting(metric, MeshMetric))
        yield


def _custom(metrics):
    """Those with an `update_state` of a user's own."""
    for metric in metrics:
        if layers.is_of_keras(metric.__class__.update_state):
            # What `compile` was given is in one.
            yield from _custom(getattr(metric, "metrics", ()))
        else:
            yield metric
