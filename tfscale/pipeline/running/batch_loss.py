"""How much each microbatch counts in the loss of the global batch."""

from typing import Any

import tensorflow as tf

from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.program import Program
from tfscale.whole_batch import losses
from tfscale.whole_batch.batch_shard import BatchShard


class BatchLoss:
    """The loss of the global batch, from those of a replica's microbatches.

    See whole_batch/losses.py for what each counts by; what layers gave to
    `add_loss` counts by rows.

    Attributes:
        inputs: Flat inputs of the model, of this replica.
        tensors: Those of the step, with the microbatches of the batch.
        shard: The rows that this replica has of the batch of all.
    """

    def __init__(
        self,
        program: Program,
        inputs: list[tf.Tensor],
        tensors: Tensors,
        device: str,
    ):
        self.inputs = inputs
        self.tensors = tensors
        self.shard = BatchShard.of_replica(inputs)
        self._program = program
        self._losses = program.stages[-1].losses
        self._device = device
        self._shares: list[tf.Tensor] = []
        self._total: Any = None

    def weigh(self, loss_scale) -> None:
        """Sets the weights of each microbatch's losses, before it runs."""
        weights = tf.constant(
            [float(x.weight) for x in self._losses], losses.precision()
        )
        with tf.device(self._device):
            self._shares = self._find_shares()
        is_vector = tf.constant([x.is_vector for x in self._losses], tf.bool)
        for microbatch, share in zip(self.tensors.microbatches, self._shares):
            share_of_rows = microbatch[keys.Rows()] / self.shard.all_rows
            microbatch[keys.AddedScale()] = loss_scale * share_of_rows
            if self._losses:
                # What is not reduced is minimised as a sum.
                count = tf.minimum(microbatch[keys.Rows()], 1.0)
                counts = tf.where(is_vector, count, share)
                microbatch[keys.LossScale()] = loss_scale * weights * counts

    def total(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """This replica's part of the loss, and of each single loss.

        To be called when all forwards of the batch have run. Computed once; no
        `cached_property`, which holds a lock for all replicas, that wait for
        each other here.
        """
        if self._total is None:
            self._total = self._add_up()
        return self._total

    def _add_up(self):
        total, single = tf.zeros((), losses.precision()), []
        shares = self._shares or self._find_shares()
        for microbatch, share in zip(self.tensors.microbatches, shares):
            if self._losses:
                single.append(
                    tf.math.multiply_no_nan(microbatch[keys.Losses()], share)
                )
            share_of_rows = microbatch[keys.Rows()] / self.shard.all_rows
            for stage in range(len(self._program.stages)):
                added = microbatch.get(keys.AddedLoss(stage))
                if added is not None:
                    total += tf.math.multiply_no_nan(added, share_of_rows)
        if self._losses:
            single = tf.unstack(tf.add_n(single))
            total += tf.add_n(
                [x.weight * v for x, v in zip(self._losses, single)]
            )
        return total, single

    def _find_shares(self):
        """Each microbatch's part of the divisors of the global batch."""
        tensors, microbatches = self.tensors, self.tensors.microbatches
        if not self._losses:
            return [None] * len(microbatches)
        for microbatch in microbatches:
            if keys.Divisors() not in microbatch:
                known = {**tensors.shared, **tensors.states, **microbatch}
                microbatch.update(self._program.divisors.run(known))
        counts = [tf.minimum(m[keys.Rows()], 1.0) for m in microbatches]
        divisors = [
            count * microbatch[keys.Divisors()]
            for count, microbatch in zip(counts, microbatches)
        ]
        total = self.shard.totals(tf.add_n(divisors))
        for microbatch in microbatches:
            microbatch[keys.Totals()] = total
            microbatch[keys.AllRows()] = self.shard.all_rows
        return [
            losses.shares(self._losses, divisor, total, count)
            for count, divisor in zip(counts, divisors)
        ]
