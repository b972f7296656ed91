"""The rows of a batch that a thread works on: a replica's or a microbatch's.

Keras sums the losses of replicas, each divided by the number of replicas: a
mean of means, and for a loss that returns a scalar too much by the number of
replicas. While replicas run, a model and its compiled losses have adapted
classes, so that both numbers are those of one device:

    what is minimised    sum_p share_p * loss_p
    what is logged       loss_p, which Keras averages by rows

`share_p` is the shard's share of the rows. Within `loss_p` each compiled loss
is multiplied by its share of the divisors (losses.py) over that of the rows.
Losses of `add_loss` and of a custom `compute_loss` count by rows, as means over
rows. A pipeline weighs the losses of all its microbatches by the same methods,
before any of them runs.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.context import step_context
from tfscale.graphs.with_gradient import with_gradient
from tfscale.step import losses
from tfscale.tensor_parallel import layer_losses


class BatchShard:
    """Rows of a batch, whose losses count by their divisors.

    Created in the thread and the graph of the step.

    Args:
        rows: Number of rows, a scalar.
        total: Sums a tensor over the shards. All shards call it for the same
            tensors in the same order.
        num_replicas: The number by which Keras divides means.
        layers: Layers that may hold losses, which `total` leaves alone.
        weight: The factor that gradients are multiplied by afterwards.
        all_rows: Number of rows of the batch, if known.
        is_whole: Whether there is no other shard.
        compiled: A list for the losses given to `compile`, if the caller of
            `compute_loss` weighs and logs them itself, or None.
        has_loss: Whether it is for losses and metrics too, and not for layers
            only.
        is_common: Whether all replicas have the same rows.
        is_of_keras: Whether the step is Keras' own, which adds all that layers
            pass to `add_loss` to a loss that is weighed afterwards.

    Attributes:
        is_divided: Whether the loss has been divided for the sum over shards.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: Callable[[tf.Tensor], tf.Tensor],
        num_replicas: int,
        layers: Sequence[keras.Layer] = (),
        weight: tf.Tensor | float = 1.0,
        all_rows: tf.Tensor | None = None,
        is_whole: bool = False,
        compiled: list | None = None,
        has_loss: bool = True,
        is_common: bool = False,
        is_of_keras: bool = False,
    ):
        self.rows = rows
        self.num_replicas = num_replicas
        self.weight = weight
        self.is_whole = is_whole
        self.compiled = compiled
        self.is_divided = False
        self.is_common = is_common
        self.is_of_keras = is_of_keras
        self._total = total
        self._all_rows = all_rows
        self._share = None
        self._losses: list[tf.Tensor] = []  # each is a replica's share
        self._is_divided_in_layer = False
        self._layers = layers
        graph = tf.compat.v1.get_default_graph()
        self.graph = graph if has_loss else None

    @classmethod
    def of_replica(cls, data, layers=(), **options) -> "BatchShard":
        """The shard of this replica, whose rows are counted."""
        context = tf.distribute.get_replica_context()
        count = context.num_replicas_in_sync
        reduce = functools.partial(
            context.all_reduce, tf.distribute.ReduceOp.SUM
        )
        total = reduce if count > 1 else tf.identity
        rows = losses.num_rows(data)
        return cls(rows, total, count, layers, **options)

    # No `functools.cached_property`: one lock for all threads, and the first
    # replica to hold it waits for the others in `total`.

    @property
    def all_rows(self) -> tf.Tensor:
        """Number of rows of all shards, a scalar."""
        if self._all_rows is None:
            self._all_rows = self.total(self.rows)
        return self._all_rows

    @property
    def share(self) -> tf.Tensor:
        """Share of the rows of the batch, a scalar; 0 without rows."""
        if self._share is None:
            self._share = self.share_of(self.rows)
        return self._share

    def counts(self, rows: tf.Tensor) -> tf.Tensor:
        """What some rows each count in a sum over shards; 0 without any."""
        counts = losses.counts(rows)
        return counts / self.num_replicas if self.is_common else counts

    def share_of(self, rows: tf.Tensor) -> tf.Tensor:
        """The shares of some numbers of rows in the batch; 0 without rows."""
        return tf.math.divide_no_nan(rows, self.all_rows)

    def totals(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sums a vector over the shards.

        The number of rows is summed with it.
        """
        if self._all_rows is not None:
            return self.total(numbers)
        with_rows = tf.concat([numbers, [self.rows]], axis=0)
        *totals, self._all_rows = tf.unstack(self.total(with_rows))
        return tf.stack(totals)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the shards."""
        # Meanwhile another replica calls the same layers.
        with layer_losses.kept(self._layers):
            # No gradient flows through a divisor.
            return self._total(tf.stop_gradient(tensor))

    def loss_of(self, model, compute_loss, args, kwargs) -> tf.Tensor | None:
        """The result of a model's `compute_loss`; in replica context."""
        self.is_divided = True
        self._warn_of_divided_twice(model)
        with losses.as_on_one_device():
            loss = compute_loss(*args, **kwargs)
        if loss is None:
            return None
        # A vector is logged as a mean, and minimised as a sum.
        is_scalar = loss.shape.rank == 0
        share = self.share if is_scalar else self.counts(self.rows)
        return self._share_of(loss, self.num_replicas, share)

    def _share_of(self, loss, divisor, share):
        """A replica's share: a value is divided, a gradient multiplied."""
        found = weighed(
            loss,
            tf.cast(losses.counts(self.rows) / divisor, loss.dtype),
            tf.cast(tf.math.divide_no_nan(share, self.weight), loss.dtype),
        )
        self._losses.append(found)
        return found

    @contextlib.contextmanager
    def within_layer(self) -> Iterator[None]:
        """Within it, a layer calls a Keras loss, which it may add.

        In a step of Keras what layers add is weighed afterwards. Another step
        may take the loss for its own.
        """
        if self.is_of_keras:
            with losses.as_on_one_device():
                yield
            return
        self._is_divided_in_layer = True
        yield

    def _warn_of_divided_twice(self, model):
        is_added = any(map(attributes.noted_losses, self._layers))
        if self.num_replicas > 1 and self._is_divided_in_layer and is_added:
            warnings.warn(
                "`compute_loss` weighs what layers add by rows. Received: a "
                f"Keras loss that a layer of {model.name!r} adds, which Keras "
                "has divided by the number of replicas before, in a step that "
                f"is not Keras' own: it counts {self.num_replicas} times too "
                "little. Add the mean of a function, like "
                "`keras.losses.huber`, or train by Keras' step.",
                stacklevel=2,
            )

    def direct_loss_of(self, loss, args, kwargs) -> tf.Tensor:
        """The result of a Keras loss that a step calls; in replica context.

        Keras asks for the number of replicas to divide a mean by it.
        """
        before, self.is_divided = self.is_divided, False
        result = loss(*args, **kwargs)
        has_divided, self.is_divided = self.is_divided, True
        if not has_divided:
            self.is_divided = before
            return result
        return self._share_of(result, 1, self.share * self.num_replicas)

    def unscaled(self, value: Any) -> Any:
        """The loss of these rows, if it is a share; another value as it is."""
        if any(value is loss for loss in self._losses):
            return value * self.num_replicas
        return value

    def logged(self, value: Any) -> Any:
        """A value that a step returns, of which replicas take the mean.

        A share of a loss is the loss of these rows, which counts by them.
        """
        loss = self.unscaled(value)
        if loss is value:
            return value
        share = tf.math.divide_no_nan(self.share, self.weight)
        return loss * tf.cast(share * self.num_replicas, loss.dtype)

    def compiled_loss_of(
        self, compile_loss, y_true, y_pred, sample_weight
    ) -> tf.Tensor | None:
        """The result of a `CompileLoss`, each loss by its divisor."""
        if not compile_loss.built:
            # Keras could not call this model on its data.
            compile_loss.build(y_true, y_pred)
        with step_context.within(batch_shard=None):
            found = losses.compiled_losses(
                compile_loss, y_true, y_pred, sample_weight
            )
        if not found:
            return None
        if not self.is_whole:
            losses.warn_of_reduced(found)
        divisors = tf.stack([loss.divisor for loss in found])
        shares = losses.shares(
            found, divisors, self.totals(divisors), self.counts(self.rows)
        )
        factors = tf.unstack(tf.math.divide_no_nan(shares, self.share))
        values = [
            _with_a_row(loss.value)
            if loss.is_vector
            # Without rows a mean of the user's own is NaN.
            else tf.math.multiply_no_nan(
                loss.value, tf.cast(factor, loss.value.dtype)
            )
            for loss, factor in zip(found, factors)
        ]
        if self.compiled is not None:
            self.compiled += found
        else:
            rows = keras.tree.flatten(y_pred)[0].shape[0]
            metrics = compile_loss.metrics
            losses.log(metrics, values, rows, self.share, self.rows)
        return sum(loss.weighted(value) for loss, value in zip(found, values))

    def metrics_of_all(self, compute: Callable[[], Any]) -> Any:
        """What `compute` makes of metrics, summed over replicas here.

        The mean of what each of them has would not be of the rows, if they
        have different numbers of these. Only the replica's own in a microbatch,
        for rows that all replicas have, and over workers.
        """
        strategy = tf.distribute.get_strategy()
        if (
            self.is_common
            or self.num_replicas == 1
            or getattr(strategy.extended, "workers", True) is not None
            or step_context.current().gradient_capture is not None
        ):
            return compute()
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda _: compute())


def weighed(
    loss: tf.Tensor, to_log: tf.Tensor, to_minimise: tf.Tensor
) -> tf.Tensor:
    """The loss times one factor, its gradient times another one."""
    with symbols.record.stop_recording():
        result = tf.math.multiply_no_nan(loss, to_log)
    (result,) = with_gradient(_weighed_gradient, [result], [loss, to_minimise])
    return result


def _weighed_gradient(gradients, inputs):
    (upstream,), (_, to_minimise) = gradients, inputs
    return tf.math.multiply_no_nan(upstream, to_minimise), None


def _with_a_row(vector):
    """The vector, or a zero in place of no rows, whose mean would be NaN."""
    more = tf.maximum(1 - tf.shape(vector)[0], 0)
    return tf.pad(vector, [[0, more], *[[0, 0]] * (vector.shape.rank - 1)])


def warn_of_undivided() -> None:
    """Warns if a `train_step` has not divided its loss over the replicas."""
    batch_shard = step_context.current().batch_shard
    if (
        batch_shard is None
        or batch_shard.num_replicas == 1
        or batch_shard.is_divided
    ):
        return
    warnings.warn(
        "Gradients are added up over replicas, so the loss of each has to be "
        "its part of the loss of the whole batch. Received: a `train_step` "
        "whose loss comes neither from `compute_loss` nor from a loss of "
        "Keras, and that has not asked for the number of replicas, "
        f"{batch_shard.num_replicas}: gradients are so many times too large "
        "if it is a mean over the rows that it has. Use "
        "`self.compute_loss(...)`, to which a layer's `add_loss` adds, or "
        "divide by `tf.distribute.get_strategy().num_replicas_in_sync`.",
        stacklevel=2,
    )
