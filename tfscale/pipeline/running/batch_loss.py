"""How much each microbatch counts in the loss of the global batch."""

import dataclasses

import tensorflow as tf

from tfscale.context import step_context
from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.program import Program
from tfscale.step import losses
from tfscale.step.batch_shard import BatchShard


@dataclasses.dataclass(eq=False)
class BatchLoss:
    """The loss of the global batch, from those of a replica's microbatches.

    See step/losses.py for what each counts by; what layers gave to
    `add_loss` counts by rows. `tensors` are those of the step, with the
    microbatches of the batch; `inputs` of the model are flat.
    """

    program: Program
    inputs: list[tf.Tensor]
    tensors: Tensors
    device: str

    def __post_init__(self):
        step = step_context.current().batch_shard
        is_common = step is not None and step.is_common
        self.shard = BatchShard.of_replica(self.inputs, is_common=is_common)
        self._losses = self.program.stages[-1].losses
        self._shares = self._total = None

    def weigh(self, loss_scale) -> None:
        """Sets the weights of each microbatch's losses, before it runs."""
        with tf.device(self.device):
            self._shares = self._find_shares()
        of_rows = self.shard.share_of(self._all(keys.ROWS))
        self._set(keys.ADDED_SCALE, loss_scale * of_rows)
        if self._shares is not None:
            one = tf.ones((), losses.precision())
            weights = tf.stack([x.weighted(one) for x in self._losses])
            is_vector = tf.constant([x.is_vector for x in self._losses])
            # What is not reduced is minimised as a sum.
            counts = tf.where(is_vector, self._sum_shares(), self._shares)
            self._set(keys.LOSS_SCALE, loss_scale * weights * counts)

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
        if self._shares is None:
            self._shares = self._find_shares()
        of_rows = self.shard.share_of(self._all(keys.ROWS))
        for stage in range(len(self.program.stages)):
            key = keys.AddedLoss(stage)
            if key in self.tensors.microbatches[0]:
                added = tf.math.multiply_no_nan(self._all(key), of_rows)
                total += tf.reduce_sum(added)
        if self._shares is not None:
            means = self._all(keys.LOSSES)
            counted = tf.math.multiply_no_nan(means, self._shares)
            single = tf.unstack(tf.reduce_sum(counted, axis=0))
            total += tf.add_n(
                [x.weighted(v) for x, v in zip(self._losses, single)]
            )
        return total, single

    def _find_shares(self):
        """Each microbatch's part of the divisors of the global batch.

        Of shape `[microbatches, losses]`; None without losses.
        """
        tensors, microbatches = self.tensors, self.tensors.microbatches
        if not self._losses:
            return None
        for microbatch in microbatches:
            if keys.DIVISORS not in microbatch:
                known = {**tensors.shared, **tensors.states, **microbatch}
                microbatch.update(self.program.divisors.run(known))
        counts = self._counts()
        divisors = counts * self._all(keys.DIVISORS)
        total = self.shard.totals(tf.reduce_sum(divisors, axis=0))
        for microbatch in microbatches:
            microbatch[keys.TOTALS] = total
            microbatch[keys.ALL_ROWS] = self.shard.all_rows
        sum_shares = self._sum_shares()
        return losses.shares(self._losses, divisors, total, sum_shares)

    def _all(self, key):
        return tf.stack([each[key] for each in self.tensors.microbatches])

    def _set(self, key, values):
        microbatches = self.tensors.microbatches
        values = tf.unstack(values, len(microbatches))
        for microbatch, value in zip(microbatches, values, strict=True):
            microbatch[key] = value

    def _sum_shares(self):
        """Weights of the microbatches in a sum, `[microbatches, 1]`."""
        return self.shard.counts(self._all(keys.ROWS))[:, tf.newaxis]

    def _counts(self):
        """1 for each microbatch that has rows, else 0: `[microbatches, 1]`."""
        return losses.counts(self._all(keys.ROWS))[:, tf.newaxis]
