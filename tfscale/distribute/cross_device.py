"""How tensors of replicas are put together: on each device that needs it."""

import functools

import tensorflow as tf

from tfscale import _internals


class SumOnEachDevice(tf.distribute.ReductionToOneDevice):
    """Reduces or gathers tensors on every device that holds one of them.

    Each device gets the others' tensors and adds them up in the order of the
    replicas, so results are equal to the last bit, and no device waits for
    the sum of another one. Of several model ranks, each is summed with the
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
        with tf.device(tensors[0].device):
            return self.broadcast(_reduced(reduce_op, tensors), destinations)

    def reduce_on_each(self, reduce_op, value):
        """The sum or mean of a value, a copy on each of its devices."""
        return self._on_each(functools.partial(_reduced, reduce_op), value)

    def reduce_shared(self, reduce_op, value, num_replicas):
        """The sum or mean of one tensor that is the value of all replicas."""
        total = tf.convert_to_tensor(value)
        if reduce_op == tf.distribute.ReduceOp.SUM:
            total *= tf.cast(num_replicas, total.dtype)
        return total

    def gather_on_each(self, value, axis):
        """The replicas' values one after the other, on each of the devices."""
        return self._on_each(lambda tensors: tf.concat(tensors, axis), value)

    def _on_each(self, compute, value):
        """Calls `compute(tensors of all replicas)` on each rank's device."""
        tensors = [tf.convert_to_tensor(v) for v in value.values]
        results = []
        for index, tensor in enumerate(tensors):
            with tf.device(tensor.device):
                results.append(
                    compute(tensors[index % self._num_ranks :: self._num_ranks])
                )
        return _internals.distribute_utils.regroup(
            tuple(results), wrap_class=_internals.Mirrored
        )


def _reduced(reduce_op, tensors):
    total = tf.add_n(tensors)
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        total /= tf.cast(len(tensors), total.dtype)
    return total
