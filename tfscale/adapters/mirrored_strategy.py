"""A `tf.distribute.MirroredStrategy` whose replicas run microbatches."""

import contextlib

import tensorflow as tf

from tfscale._internals import in_place
from tfscale.step import step_context


class CountedMirrored(in_place.Mixin):
    """Members that are put before the class of the strategy's `extended`.

    A `MeshStrategy` does the same by itself, see `mesh/extended.py`.
    """

    @property
    def _num_replicas_in_sync(self):
        if step_context.current().is_one_replica:
            return 1
        return super()._num_replicas_in_sync


def adapted_strategy(strategy: tf.distribute.Strategy):
    """Within it, Keras can be told that there is one replica."""
    if type(strategy) is not tf.distribute.MirroredStrategy:
        return contextlib.nullcontext()
    return in_place.putting(strategy.extended, CountedMirrored)
