"""Strategies: replicas that run microbatches, and threads that take turns."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._internals import in_place
from tfscale._internals import symbols
from tfscale.context import step_context
from tfscale.graphs.with_gradient import with_gradient


class CountedMirrored(in_place.Mixin):
    """Members that are put before the class of the strategy's `extended`.

    A `MeshStrategy` does the same by itself, see `mesh/extended.py`.
    """

    @property
    def _num_replicas_in_sync(self):
        one = step_context.current().sees_one_device
        return 1 if one else self.num_all_replicas

    @property
    def num_all_replicas(self):
        """Number of replicas, also in a step of a model."""
        return super()._num_replicas_in_sync


def adapt_strategy(strategy: tf.distribute.Strategy) -> None:
    """Puts the class of this module before that of a `MirroredStrategy`."""
    if type(strategy) is tf.distribute.MirroredStrategy:
        in_place.put(strategy.extended, CountedMirrored)


class MeshReplicaContext(in_place.Mixin):
    """The context of a thread that calls layers in turns with others.

    Others may run in the context that `kept` makes.
    """

    kept: Any

    def merge_call(self, merge_fn, args=(), kwargs=None):
        """See `tf.distribute.ReplicaContext`."""
        with self.kept():
            return super().merge_call(merge_fn, args, kwargs)

    def all_reduce(self, reduce_op, value, options=None):
        """See `tf.distribute.ReplicaContext`; its gradient keeps no graph."""
        extended = self.strategy.extended
        if extended.gradients_are_summed:
            # TensorFlow would move the gradients of all stages through one
            # operation on one device.
            return value
        tensors = tf.nest.flatten(value)
        if any(isinstance(x, tf.IndexedSlices) for x in tensors):
            return super().all_reduce(reduce_op, value, options)
        tensors = [tf.convert_to_tensor(x) for x in tensors]

        def backward(gradients, _):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(reduce_op, list(gradients))

        with symbols.record.stop_recording():
            merge = functools.partial(extended.reduce_all, reduce_op)
            sums = self.merge_call(merge, tensors)
        if symbols.record.could_possibly_record():
            sums = with_gradient(backward, sums, tensors)
        return tf.nest.pack_sequence_as(value, sums)

    def all_gather(self, value, axis, options=None):
        """See `tf.distribute.ReplicaContext`; of a shared tensor too."""
        value = tf.nest.map_structure(tf.identity, value)
        return super().all_gather(value, axis, options)


class RankContext(MeshReplicaContext):
    """The context of a model rank, which has the number of its replica."""

    @property
    def replica_id_in_sync_group(self):
        """See `tf.distribute.ReplicaContext`."""
        thread = int(tf.get_static_value(super().replica_id_in_sync_group))
        return tf.constant(thread // self.strategy.extended.num_model_ranks)


def adapt_replica_context(
    context: tf.distribute.ReplicaContext, kept: Callable
) -> None:
    """Puts a class before that of a replica's context; see `kept` there."""
    has_ranks = context.strategy.extended.num_model_ranks > 1
    kind = RankContext if has_ranks else MeshReplicaContext
    in_place.put(context, kind, kept=kept)
