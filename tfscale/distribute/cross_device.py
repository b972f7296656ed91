"""How tensors are summed over replicas: on every device that needs the sum."""

import tensorflow as tf

from tfscale import _internals


class SumOnEachDevice(tf.distribute.ReductionToOneDevice):
    """Reduces a batch of tensors on every device that holds one of them.

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

    def reduce_on_each(self, reduce_op, value):
        """The sum or mean of a value, a copy on each of its devices."""
        tensors = [tf.convert_to_tensor(v) for v in value.values]
        results = []
        for index, tensor in enumerate(tensors):
            replicas = tensors[index % self._num_ranks :: self._num_ranks]
            with tf.device(tensor.device):
                total = tf.add_n(replicas)
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    total /= tf.cast(len(replicas), total.dtype)
                results.append(total)
        return _internals.distribute_utils.regroup(
            tuple(results), wrap_class=_internals.Mirrored
        )
