"""The rows of a batch that a thread works on: a replica's or a microbatch's.

A step on a part of a batch sees one device, whose batch these rows are: Keras
divides no mean by the number of replicas, which reads as 1. Whatever the step
computes of them counts by them:

    gradients, logs, a single number given to a mean     sum_p share_p * value_p

`share_p` is the part's share of the rows. A loss given to `compile` counts by
its divisor (losses.py), as on one device: within `compute_loss` it is
multiplied by its share of the divisors over that of the rows. Losses of
`add_loss`, of a custom `compute_loss` or of a step's own are means over rows.
A pipeline weighs the losses of all its microbatches by `shares_of`, before any
of them runs.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.adapters.layer import with_a_row
from tfscale.context import step_context
from tfscale.graphs.with_gradient import with_gradient
from tfscale.step import losses
from tfscale.step.batch_norm import sum_over_replicas
from tfscale.tensor_parallel import layer_losses


@dataclasses.dataclass(eq=False)
class BatchShard:
    """Rows of a batch, whose losses count by their divisors.

    Created in the thread and the graph of the step.

    Attributes:
        rows: Number of rows, a scalar.
        sum_up: Sums a tensor over the shards. All shards call it for the same
            tensors in the same order.
        num_replicas: The number by which Keras divides means.
        layers: Layers that may hold losses, which `sum_up` leaves alone.
        known_rows: Number of rows of the batch, None until it is known.
        compiled: A list for the losses given to `compile`, if the caller of
            `compute_loss` weighs and logs them itself, or None.
        is_common: Whether all replicas have the same rows.
        weighs_loss: Whether the loss that an optimizer scales counts by the
            rows, and not the gradients: in steps of Keras, of one loss and one
            optimizer. In half precision they then have the range of the whole
            batch's.
        graph: The graph in which it is for losses and metrics too; None if it
            is for layers only.
    """

    rows: tf.Tensor
    sum_up: Callable[[tf.Tensor], tf.Tensor]
    num_replicas: int
    layers: Sequence[keras.Layer] = ()
    known_rows: tf.Tensor | None = None
    compiled: list | None = None
    is_common: bool = False
    weighs_loss: bool = False
    graph: tf.Graph | None = dataclasses.field(
        default_factory=tf.compat.v1.get_default_graph
    )
    _share: tf.Tensor | None = dataclasses.field(default=None, init=False)

    @classmethod
    def of_replica(cls, data, layers=(), **options) -> "BatchShard":
        """The shard of this replica, whose rows are counted."""
        return cls(
            losses.num_rows(data),
            lambda tensor: sum_over_replicas([tensor])[0],
            step_context.num_replicas(),
            layers,
            **options,
        )

    def of_batch(self, data) -> "BatchShard":
        """The shard of the same replica of another batch."""
        rows = losses.num_rows(data)
        return dataclasses.replace(self, rows=rows, known_rows=None)

    # No `functools.cached_property`: one lock for all threads, and the first
    # replica to hold it waits for the others in `total`.

    @property
    def all_rows(self) -> tf.Tensor:
        """Number of rows of all shards, a scalar."""
        if self.known_rows is None:
            self.known_rows = self.total(self.rows)
        return self.known_rows

    @property
    def share(self) -> tf.Tensor:
        """Share of the rows of the batch, a scalar; 0 without rows."""
        if self._share is None:
            self._share = self.share_of(self.rows)
        return self._share

    def counts(self, rows: tf.Tensor) -> tf.Tensor:
        """Weight of each shard in a sum: 0 without any rows."""
        counts = losses.counts(rows)
        return counts / self.num_replicas if self.is_common else counts

    def share_of(self, rows: tf.Tensor) -> tf.Tensor:
        """The shares of some numbers of rows in the batch; 0 without rows."""
        return tf.math.divide_no_nan(rows, self.all_rows)

    def shares_of(
        self,
        found: Sequence[losses.CompiledLoss],
        divisors: tf.Tensor,
        rows: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The share of each loss in that of the batch, and all divisors' sums.

        Of the shard, `[losses]` each; of its parts, whose `rows` are a vector,
        divisors and shares are `[parts, losses]`.
        """
        counts, summed = self.counts(rows), divisors
        if rows.shape.rank:
            counts = counts[:, tf.newaxis]
            divisors *= losses.counts(rows)[:, tf.newaxis]
            summed = tf.reduce_sum(divisors, axis=0)
        totals = self.totals(summed)
        is_sum = tf.constant([loss.is_sum for loss in found])
        shares = tf.math.divide_no_nan(divisors, totals)
        return tf.where(is_sum, counts, shares), totals

    def totals(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sums a vector over the shards.

        The number of rows is summed with it.
        """
        if self.known_rows is not None:
            return self.total(numbers)
        with_rows = tf.concat([numbers, [self.rows]], axis=0)
        *totals, self.known_rows = tf.unstack(self.total(with_rows))
        return tf.stack(totals)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the shards."""
        # Meanwhile another replica calls the same layers.
        with layer_losses.kept(self.layers):
            # No gradient flows through a divisor.
            return self.sum_up(tf.stop_gradient(tensor))

    def loss_of(self, compute_loss, args, kwargs) -> tf.Tensor | None:
        """The result of a model's `compute_loss`; in replica context."""
        loss = compute_loss(*args, **kwargs)
        if loss is None:
            return None
        if loss.shape.rank == 0:
            # Without rows a mean is NaN.
            return times(loss, losses.counts(self.rows))
        # A vector is logged as a mean, and minimised as a sum.
        factor = tf.math.divide_no_nan(self.counts(self.rows), self.share)
        return weighed(loss, factor)

    def weigh_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """A loss whose gradient counts by the rows, if `weighs_loss`."""
        if not self.weighs_loss:
            return loss
        return weighed(tf.convert_to_tensor(loss), self.share)

    def weigh(self, gradient: Any) -> Any:
        """A gradient that counts by the rows.

        One that replicas have in common, because it was summed, is unchanged
        by a sum of these.
        """
        if gradient is None or self.weighs_loss:
            return gradient
        return times(gradient, self.share)

    def logged(self, value: Any) -> Any:
        """A value that a step returns, to be averaged over the replicas."""
        # Variables, and numbers of Python, are those of all replicas.
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        return times(value, self.share * self.num_replicas)

    def compiled_loss_of(
        self, compile_loss, y_true, y_pred, sample_weight
    ) -> tf.Tensor | None:
        """The result of a `CompileLoss`, each loss by its divisor."""
        if not compile_loss.built:
            # Keras could not call this model on its data.
            compile_loss.build(y_true, y_pred)
        found = losses.compiled_losses(
            compile_loss, y_true, y_pred, sample_weight
        )
        if not found:
            return None
        divisors = tf.stack([loss.divisor for loss in found])
        shares, _ = self.shares_of(found, divisors, self.rows)
        factors = tf.unstack(tf.math.divide_no_nan(shares, self.share))
        values = [
            # Without rows a mean is NaN.
            with_a_row(loss.value)
            if loss.is_vector
            else times(loss.value, factor)
            for loss, factor in zip(found, factors)
        ]
        if self.compiled is not None:
            self.compiled += found
        else:
            # Once, and not for each replica.
            if not symbols.get_current_replica_id_as_int():
                losses.warn_of_reduced(found)
            rows = keras.tree.flatten(y_pred)[0].shape[0]
            metrics = compile_loss.metrics
            losses.log(metrics, values, rows, self.share, self.rows)
        return sum(loss.weighted(value) for loss, value in zip(found, values))

    def metrics_of_all(self, compute: Callable[[], Any]) -> Any:
        """Calls `compute` with metrics that are summed over replicas.

        The mean of what each of them has would not be of the rows, if they
        have different numbers of these. Only the replica's own for rows that
        all replicas have, and over workers.
        """
        if (
            self.is_common
            or self.num_replicas == 1
            or tf.distribute.get_strategy().extended.workers is not None
        ):
            return compute()
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda _: compute())


def weighed(loss: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """The same loss, its gradient times a factor."""
    (result,) = with_gradient(_weighed_gradient, [loss], [loss, factor])
    return result


def _weighed_gradient(gradients, inputs):
    (upstream,), (_, factor) = gradients, inputs
    return times(upstream, factor), None


def times(tensor: Any, weight: tf.Tensor) -> Any:
    """The product, which is 0 for a weight of 0 whatever the tensor is."""
    if isinstance(tensor, tf.IndexedSlices):
        values = times(tensor.values, weight)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))
