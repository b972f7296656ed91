"""A `tf.distribute.MirroredStrategy` whose replicas run microbatches."""

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


def adapt_strategy(strategy: tf.distribute.Strategy) -> None:
    """Puts the class of this module before that of a `MirroredStrategy`."""
    if type(strategy) is tf.distribute.MirroredStrategy:
        in_place.put(strategy.extended, CountedMirrored)
