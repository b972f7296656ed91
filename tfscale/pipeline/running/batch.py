"""A batch of a step, in microbatches, whose losses its shard weighs."""

import dataclasses

import tensorflow as tf

from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.program import Program
from tfscale.step import losses
from tfscale.step.batch_shard import BatchShard


@dataclasses.dataclass(eq=False)
class Batch:
    """A replica's rows of a batch, and the loss of all its microbatches.

    `tensors` are those of the step, with the microbatches of the batch;
    `inputs` of the model are flat. `shard` says how much each loss counts; what
    layers gave to `add_loss` counts by rows.
    """

    program: Program
    inputs: list[tf.Tensor]
    tensors: Tensors
    device: str
    shard: BatchShard

    def __post_init__(self):
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
            # An unreduced loss is minimized as a sum.
            in_sums = self.shard.counts(self._all(keys.ROWS))[:, tf.newaxis]
            counts = tf.where(is_vector, in_sums, self._shares)
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
        shares, totals = self.shard.shares_of(
            self._losses, self._all(keys.DIVISORS), self._all(keys.ROWS)
        )
        for microbatch in microbatches:
            microbatch[keys.TOTALS] = totals
            microbatch[keys.ALL_ROWS] = self.shard.all_rows
        return shares

    def _all(self, key):
        return tf.stack([each[key] for each in self.tensors.microbatches])

    def _set(self, key, values):
        microbatches = self.tensors.microbatches
        values = tf.unstack(values, len(microbatches))
        for microbatch, value in zip(microbatches, values, strict=True):
            microbatch[key] = value
