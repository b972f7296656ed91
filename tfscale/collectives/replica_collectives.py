"""Sums over replicas, and gathered tensors, for ZeRO; in replica context.

Each replica's thread calls these functions, outside of loops and branches. Each
model rank exchanges tensors with the same rank of the other replicas.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.collectives import reducer
from tfscale.graphs import vectorized_map


def sum_up(
    tensors: Sequence[tf.Tensor], dims: Sequence[int | str | None]
) -> list[tf.Tensor]:
    """Sums over the replicas of all workers: the whole of each, or a shard.

    Replicas are added in order, so an element of a shard is equal to the last
    bit to that of the whole sum. See `Reducer.on_each` for `dims`.
    """

    def merge(strategy, *tensors):
        op = tf.distribute.ReduceOp.SUM
        return strategy.extended.reducer.on_each(op, tensors, dims)

    return _merge(merge, tensors)


def reduce_scatter_here(tensors: Sequence, dims: Sequence[int]) -> list:
    """Shards of the sums over this worker's replicas, copied.

    A slice would keep the buffer of the whole.
    """

    def scatter(values, dim):
        shards = []
        for shard in operations.reduce_scatter(values, dim):
            with tf.device(shard.device):
                shards.append(tf.raw_ops.DeepCopy(x=shard))
        return shards

    return _exchange(scatter, tensors, dims)


def gather(tensors: Sequence, dims: Sequence[int]) -> list[tf.Tensor]:
    """The shards of all replicas of each tensor, gathered on each replica."""
    return _exchange(operations.all_gather, tensors, dims)


def sum_over_replicas(x):
    """The sum of the replicas' tensors, also where gradients are reduced."""
    (total,) = _exchange(
        lambda values, dim: operations.all_reduce(values), [x], [0]
    )
    return total


def _exchange(collective, tensors, dims):
    """Calls `collective(values of this worker's replicas, dim)` for each."""

    def merge(strategy, *tensors):
        of_groups = strategy.extended.reducer.of_groups
        return [
            of_groups(lambda values, dim=dim: collective(values, dim), each)
            for each, dim in zip(tensors, dims)
        ]

    return _merge(merge, tensors)


def _merge(merge, tensors):
    """Calls `merge(strategy, *values)`, each value with one of each thread."""
    if not tensors:
        return []
    # A tensor without a device gets this thread's.
    placed = [x if x.device else tf.identity(x) for x in tensors]
    vectorized_map.refuse_exchange(placed)

    def of_threads(strategy, given):
        values = given.values if reducer.is_of_threads(given) else [given]
        return merge(
            strategy,
            *(
                symbols.distribute_utils.regroup(
                    each, always_wrap=len(each) > 1
                )
                for each in zip(*(get() for get in values))
            ),
        )

    # Threads that pass the same tensor object would merge to one tensor, so
    # each passes a function.
    context = tf.distribute.get_replica_context()
    return context.merge_call(of_threads, args=(lambda: placed,))
