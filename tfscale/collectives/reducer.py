"""Sums, means and gathered tensors of replicas, with or without model ranks.

    worker 0   replica 0 ─┐                      ┌─► replica 0
                          ├─ sum ─┐      ┌─ copy ┤
               replica 1 ─┘       │      │       └─► replica 1
                                  ├─ sum ┤
    worker 1   replica 2 ─┐       │      │       ┌─► replica 2
                          ├─ sum ─┘      └─ copy ┤
               replica 3 ─┘                      └─► replica 3

`tfscale.collectives` chooses the algorithm within a process; results are equal
to the last bit on all devices. Each model rank is summed with the same rank of
the other replicas.
"""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.collectives.workers import Workers

# In the place of a dim, for what is scattered already.
SCATTERED = "scattered"


class Reducer(tf.distribute.ReductionToOneDevice):
    """Reduces and gathers the values of threads, one for each rank."""

    def __init__(
        self, num_replicas: int, num_ranks: int, workers: Workers | None
    ):
        super().__init__()
        self._num_replicas = num_replicas
        self._num_ranks = num_ranks
        self._workers = workers
        self._count = num_replicas * (workers.count if workers else 1)

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        """See `tf.distribute.CrossDeviceOps`; prints nothing, as super does."""
        tensors = _tensors(per_replica_value)
        total = _of_sum(reduce_op, operations.reduce(tensors), len(tensors))
        return self.broadcast(total, destinations)

    # --- for each device ----------------------------------------------------

    def on_each(
        self,
        reduce_op: Any,
        values: Sequence[Any],
        dims: Sequence[int | str | None] = (),
    ) -> list[Any]:
        """Sums or means over all replicas, on each device of a value.

        A value that is no `DistributedValues` is the same on every replica.
        Workers exchange all values in one collective of each device.

        With `dims` these are sums. They have for each value the dim along which
        the replicas of a worker divide the sum; None or nothing, if each has
        the whole sum; `SCATTERED`, if each has a shard of its worker's sum.
        """
        with_dims = list(itertools.zip_longest(values, dims))
        if self._workers is None:
            return [self._on_each_here(reduce_op, *each) for each in with_dims]
        sums = [self._sums_here(*each) for each in with_dims]
        totals = self._workers.all_reduce(tf.nest.flatten(sums))
        totals = tf.nest.pack_sequence_as(sums, totals)
        return [
            self._copies(reduce_op, of_value, value)
            if is_of_threads(value)
            else _of_sum(reduce_op, of_value[0], self._count)
            for of_value, value in zip(totals, values)
        ]

    def _on_each_here(self, reduce_op, value, dim):
        if not is_of_threads(value):
            return self._of_shared(reduce_op, value)
        if dim is not None:
            return self._scattered(value, dim)
        if len(value.values) == 1:
            return _mirrored(value.values)

        def reduce(replicas):
            return [
                _of_sum(reduce_op, total, len(replicas))
                for total in operations.all_reduce(replicas)
            ]

        return self.of_groups(reduce, value)

    def _of_shared(self, reduce_op, value):
        total = tf.convert_to_tensor(value)
        if reduce_op == tf.distribute.ReduceOp.SUM and self._num_replicas > 1:
            total *= tf.cast(self._num_replicas, total.dtype)
        return total

    def _sums_here(self, value, dim):
        """This worker's sum for each rank, or its shard for each device."""
        if not is_of_threads(value):
            return [self._of_shared(tf.distribute.ReduceOp.SUM, value)]
        if dim is not None:
            return list(self._scattered(value, dim).values)
        tensors, count = _tensors(value), self._num_ranks
        return [operations.reduce(tensors[r::count]) for r in range(count)]

    def _scattered(self, value, dim):
        if dim == SCATTERED:
            return value
        scatter = functools.partial(operations.reduce_scatter, dim=dim)
        return self.of_groups(scatter, value)

    def _copies(self, reduce_op, totals, value):
        copies = []
        for thread, tensor in enumerate(_tensors(value)):
            with tf.device(tensor.device):
                copy = tf.identity(totals[thread % len(totals)])
                copies.append(_of_sum(reduce_op, copy, self._count))
        return _mirrored(tuple(copies))

    def of_groups(
        self, collective: Callable[[list[tf.Tensor]], list], value: Any
    ) -> Any:
        """Applies `collective` to the replicas' values, rank by rank."""
        tensors, count = _tensors(value), self._num_ranks
        groups = [range(r, len(tensors), count) for r in range(count)]
        return _mirrored(operations.in_groups(collective, tensors, groups))

    # --- for given destinations ---------------------------------------------

    def on_destinations(
        self,
        reduce_op: Any,
        tensors: Sequence[Any],
        value: Any,
        destinations: Any,
    ) -> Any:
        """The sum or mean over all replicas.

        Keras asks for the mean of a batch to learn its structure. For a batch
        without a mean, one replica's tensor is returned. `tensors` are the
        tensors of `value`, one for each replica here.
        """
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if is_mean and not self._have_mean(tensors):
            return _first_with_rows(tensors)
        if self._workers is not None:
            return (self.means if is_mean else self._sums)([tensors])[0]
        if isinstance(value, symbols.Mirrored):
            return value
        return self.reduce(reduce_op, value, destinations)

    def means(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Means over all replicas, from lists of this worker's tensors."""
        mean = tf.distribute.ReduceOp.MEAN
        return [_of_sum(mean, x, self._count) for x in self._sums(values)]

    def _sums(self, values):
        sums = []
        for tensors in values:
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
            with tf.device(tensors[0].device):
                sums.append(operations.reduce(tensors))
        return sums if self._workers is None else self._workers.all_reduce(sums)

    def _have_mean(self, tensors):
        first = tensors[0]
        if not isinstance(first, tf.Tensor):  # sparse or ragged
            return False
        if first.dtype in (tf.bool, tf.string):
            return False
        if self._workers is None:
            return all(tensor.shape == first.shape for tensor in tensors)
        if not tf.executing_eagerly() or not first.shape.rank:
            return True
        shapes = tf.constant([tensor.shape.as_list() for tensor in tensors])
        shapes = self._workers.all_gather(shapes)
        return bool(tf.reduce_all(shapes == shapes[:1]))

    def gathered(self, tensors: Sequence[Any], axis: int) -> tf.Tensor:
        """The tensors of all replicas of all workers, concatenated."""
        with tf.device(tf.convert_to_tensor(tensors[0]).device):
            here = tf.concat(tensors, axis)
            if self._workers is None:
                return here
            return self._workers.all_gather(here, axis)


def is_per_replica(value: Any, count: int) -> bool:
    """Whether a value has `count` components, and is no variable."""
    return (
        is_of_threads(value)
        and not isinstance(value, tf.Variable)
        and len(value.values) == count
    )


def of_first_ranks(value: Any, num_threads: int, num_ranks: int) -> Any:
    """The first ranks' components of a value of all ranks."""
    if not is_per_replica(value, num_threads):
        return value
    return symbols.distribute_utils.regroup(value.values[::num_ranks])


def is_of_threads(value: Any) -> bool:
    """Whether each thread has its own value; else all share one."""
    return isinstance(value, tf.distribute.DistributedValues)


def _tensors(value):
    return [tf.convert_to_tensor(each) for each in value.values]


def _mirrored(values):
    return symbols.distribute_utils.regroup(values, wrap_class=symbols.Mirrored)


def _first_with_rows(tensors):
    """A tensor of a batch that shows its structure.

    Layers may fail on empty batches, which all replicas of a worker may have:
    see `with_input_dependencies`.
    """
    for tensor in tensors:
        if tensor.shape[:1] != [0]:
            return tensor
    return tf.zeros([1, *tensors[0].shape[1:]], tensors[0].dtype)


def _of_sum(reduce_op, total, count):
    if reduce_op != tf.distribute.ReduceOp.MEAN:
        return total
    with tf.device(total.device):
        return total / tf.cast(count, total.dtype)
