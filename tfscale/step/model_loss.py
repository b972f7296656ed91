"""The loss of a model over shards of a batch: that of the whole batch.

Keras sums the losses of replicas, each divided by the number of replicas: a
mean of means, and for a loss that returns a scalar too much by the number of
replicas. While replicas run, a model and its compiled losses have adapted
classes, so that both numbers are those of one device:

    what is minimised    sum_p share_p * loss_p
    what is logged       loss_p, which Keras averages by rows

`share_p` is the shard's share of the rows. Within `loss_p` each compiled loss
is multiplied by its share of the divisors (losses.py) over that of the rows.
Losses of `add_loss` and of a custom `compute_loss` count by rows, as means over
rows.
"""

import keras
import tensorflow as tf

from tfscale.step import losses
from tfscale.step import step_context
from tfscale.step.checks import across_rows
from tfscale.step.checks import loss_trial


def loss_of(batch_shard, model, compute_loss, args, kwargs) -> tf.Tensor | None:
    """The result of a model's `compute_loss`; in replica context."""
    batch_shard.is_divided = True
    extended = tf.distribute.get_strategy().extended
    gathers = getattr(extended, "num_gathers", 0)
    with losses.as_on_one_device():
        loss = compute_loss(*args, **kwargs)
    if gathers == getattr(extended, "num_gathers", 0):
        # A loss that gathers rows knows of the other replicas.
        loss_trial.check(model, args, kwargs)
    _check_rows(model, batch_shard, *args, **kwargs)
    if loss is None:
        return None
    # A vector is logged as a mean, and minimised as a sum.
    share = batch_shard.share if loss.shape.rank == 0 else 1.0
    counts = tf.minimum(batch_shard.rows, 1.0)
    return weighed(
        loss,
        tf.cast(counts / batch_shard.num_replicas, loss.dtype),
        tf.cast(tf.math.divide_no_nan(share, batch_shard.weight), loss.dtype),
    )


def _check_rows(model, batch_shard, x=None, y=None, y_pred=None, *_, **__):
    # With a weight it is a microbatch.
    if batch_shard.changes is not None:
        others = batch_shard.changes.data_of_others
        across_rows.check(model, x, y_pred, others)
    elif tf.is_tensor(batch_shard.weight):
        across_rows.check(model, x, y_pred)


def compiled_loss_of(
    batch_shard, compile_loss, y_true, y_pred, sample_weight
) -> tf.Tensor | None:
    """The result of a `CompileLoss`, each loss by its divisor."""
    if not compile_loss.built:
        # Keras could not call this model on its data.
        compile_loss.build(y_true, y_pred)
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    with step_context.within(batch_shard=None):
        found = losses.compiled_losses(
            compile_loss, y_true, y_pred, sample_weight
        )
    if batch_shard.changes is not None:
        batch_shard.changes.note_since(graph, num_before)
    if not found:
        return None
    if not batch_shard.is_whole:
        losses.warn_of_reduced(found)
    divisors = tf.stack([loss.divisor for loss in found])
    shares = losses.shares(found, divisors, batch_shard.totals(divisors))
    factors = tf.unstack(tf.math.divide_no_nan(shares, batch_shard.share))
    values = [
        loss.value
        if loss.is_vector
        else loss.value * tf.cast(factor, loss.value.dtype)
        for loss, factor in zip(found, factors)
    ]
    if batch_shard.compiled is not None:
        batch_shard.compiled += found
    else:
        rows = keras.tree.flatten(y_pred)[0].shape[0]
        losses.log(compile_loss.metrics, values, rows, batch_shard.share)
    return sum(
        value if loss.weight == 1.0 else value * loss.weight
        for loss, value in zip(found, values)
    )


@tf.custom_gradient
def weighed(loss: tf.Tensor, to_log: tf.Tensor, to_minimise: tf.Tensor):
    """The loss times one factor, its gradient times another one."""

    def gradient(upstream):
        return tf.math.multiply_no_nan(upstream, to_minimise), None, None

    return tf.math.multiply_no_nan(loss, to_log), gradient
