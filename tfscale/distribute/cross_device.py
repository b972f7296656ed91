"""How tensors of replicas are put together: on each device that needs it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale.collectives import operations
from tfscale.collectives.workers import Workers


class SumOnEachDevice(tf.distribute.ReductionToOneDevice):
    """Reduces or gathers tensors on every device that holds one of them.

    By which algorithm, `tfscale.collectives` decides; results are equal to the
    last bit on all devices. Of several model ranks, each is summed with the
    same rank of the other replicas.

    Args:
        num_model_ranks: Number of model ranks of each replica.
    """

    def __init__(self, num_model_ranks):
        super().__init__()
        self._num_ranks = num_model_ranks

    def batch_reduce_implementation(
        self, reduce_op, value_destination_pairs, options
    ):
        """See `tf.distribute.CrossDeviceOps`."""
        return [
            self.reduce_on_each(reduce_op, value)
            for value, _ in value_destination_pairs
        ]

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        """See `tf.distribute.CrossDeviceOps`; prints nothing, as super does."""
        tensors = [tf.convert_to_tensor(v) for v in per_replica_value.values]
        total = _of_sum(reduce_op, operations.reduce(tensors), len(tensors))
        return self.broadcast(total, destinations)

    def reduce_on_each(self, reduce_op, value):
        """The sum or mean of a value, a copy on each of its devices."""

        def reduce(replicas):
            return [
                _of_sum(reduce_op, total, len(replicas))
                for total in operations.all_reduce(replicas)
            ]

        return self._on_each(reduce, value)

    def reduce_shared(self, reduce_op, value, num_replicas):
        """The sum or mean of one tensor that is the value of all replicas."""
        total = tf.convert_to_tensor(value)
        if reduce_op == tf.distribute.ReduceOp.SUM:
            total *= tf.cast(num_replicas, total.dtype)
        return total

    def gather_on_each(self, value, axis):
        """The replicas' values one after the other, on each of the devices."""
        return self._on_each(
            lambda replicas: operations.all_gather(replicas, axis), value
        )

    def _on_each(self, collective, value):
        """A collective of all replicas, for each model rank."""
        tensors = [tf.convert_to_tensor(v) for v in value.values]
        results = operations.in_groups(
            collective, tensors, same_ranks(len(tensors), self._num_ranks)
        )
        return _internals.distribute_utils.regroup(
            results, wrap_class=_internals.Mirrored
        )


class SumOverWorkers(SumOnEachDevice):
    """Likewise, of the replicas of all workers.

    Args:
        num_model_ranks: Number of model ranks of each replica.
        workers: The workers.
    """

    def __init__(self, num_model_ranks, workers: Workers):
        super().__init__(num_model_ranks)
        self._workers = workers

    def reduce_all(self, reduce_op, values, num_replicas):
        """Sums or means, in one collective for each device.

        Args:
            reduce_op: Which of them.
            values: Each of all threads here; or one tensor, which is the value
                of every replica.
            num_replicas: Number of replicas of this worker.

        Returns:
            Values of all threads; or tensors.
        """
        threads = [
            [tf.convert_to_tensor(v) for v in value.values]
            if isinstance(value, tf.distribute.DistributedValues)
            else None
            for value in values
        ]
        places, sums = [], []
        for index, (value, tensors) in enumerate(zip(values, threads)):
            if tensors is None:
                total = tf.convert_to_tensor(value)
                if num_replicas > 1:
                    total *= tf.cast(num_replicas, total.dtype)
                places.append((index, 0))
                sums.append(total)
                continue
            for rank, group in enumerate(
                same_ranks(len(tensors), self._num_ranks)
            ):
                here = [tensors[i] for i in group]
                places.append((index, rank))
                sums.append(operations.reduce(here))
        totals = dict(zip(places, self._workers.all_reduce(sums)))
        count = num_replicas * self._workers.count
        results = []
        for index, tensors in enumerate(threads):
            if tensors is None:
                results.append(_of_sum(reduce_op, totals[index, 0], count))
                continue
            copies = []
            for thread, tensor in enumerate(tensors):
                with tf.device(tensor.device):
                    copy = tf.identity(totals[index, thread % self._num_ranks])
                    copies.append(_of_sum(reduce_op, copy, count))
            results.append(
                _internals.distribute_utils.regroup(
                    tuple(copies), wrap_class=_internals.Mirrored
                )
            )
        return results


def have_mean(parts: Sequence[Any]) -> bool:
    """Whether the parts of a batch are tensors that can be averaged."""
    first = parts[0]
    return (
        isinstance(first, tf.Tensor)  # and neither sparse nor ragged
        and first.dtype not in (tf.bool, tf.string)
        and all(part.shape == first.shape for part in parts)
    )


def part_with_rows(parts: Sequence[Any]) -> Any:
    """A part of a batch that says what the batch is like.

    Layers are not written for no rows, which all replicas of a worker may have:
    see `behind_its_data`.
    """
    for part in parts:
        if part.shape[:1] != [0]:
            return part
    return tf.zeros([1, *parts[0].shape[1:]], parts[0].dtype)


def same_ranks(num_devices: int, num_ranks: int) -> list[range]:
    """For each model rank, its devices in all replicas, by index."""
    return [range(rank, num_devices, num_ranks) for rank in range(num_ranks)]


def _of_sum(reduce_op, total, count):
    """The sum, or the mean, on its device."""
    if reduce_op != tf.distribute.ReduceOp.MEAN:
        return total
    with tf.device(total.device):
        return total / tf.cast(count, total.dtype)
