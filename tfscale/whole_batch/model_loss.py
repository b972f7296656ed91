"""The loss of a model whose batch is in parts: that of the whole batch.

Keras adds up what its replicas make of their parts, each divided by the number
of replicas: a mean of means, and of a loss that returns a scalar the number of
replicas times too much. While replicas run, a model and what it was compiled
with are of the classes here, so that both are as on one device:

    what is minimised    sum_p share_p * loss_p
    what is logged       loss_p, which Keras averages by rows

`share_p` is the part's share of the rows, and within `loss_p` each compiled
loss has been multiplied by its share of the divisors (losses.py) over that of
the rows. So what a layer gives to `add_loss`, and a `compute_loss` of one's
own, count by rows: they are taken for means over rows.
"""

import contextlib

import keras
import tensorflow as tf

from tfscale import step_context
from tfscale._internals import attributes
from tfscale.adapters.compile_loss import adapt_compile_loss
from tfscale.adapters.model import adapted_model
from tfscale.whole_batch import across_rows
from tfscale.whole_batch import loss_trial
from tfscale.whole_batch import losses


def loss_of(batch_shard, model, compute_loss, args, kwargs) -> tf.Tensor | None:
    """What `compute_loss` of a model returns; in replica context."""
    batch_shard.is_divided = True
    extended = tf.distribute.get_strategy().extended
    gathers = getattr(extended, "num_gathers", 0)
    with losses.as_on_one_device():
        loss = compute_loss(*args, **kwargs)
    if gathers == getattr(extended, "num_gathers", 0):
        # What gathers the rows of all replicas knows of them.
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
    # With a weight of its own it is a microbatch.
    if batch_shard.changes is not None:
        others = batch_shard.changes.data_of_others
        across_rows.check(model, x, y_pred, others)
    elif tf.is_tensor(batch_shard.weight):
        across_rows.check(model, x, y_pred)


def compiled_loss_of(
    batch_shard, compile_loss, y_true, y_pred, sample_weight
) -> tf.Tensor | None:
    """What a `CompileLoss` returns, each loss by its divisor."""
    if not compile_loss.built:
        # Of a model that Keras could not call on its data.
        compile_loss.build(y_true, y_pred)
    with step_context.within(batch_shard=None):
        found = losses.compiled_losses(
            compile_loss, y_true, y_pred, sample_weight
        )
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
    rows = keras.tree.flatten(y_pred)[0].shape[0]
    if batch_shard.compiled is not None:
        batch_shard.compiled += found
    else:
        for metric, value in zip(compile_loss.metrics, values):
            # As in Keras, batches of unknown size count equally here.
            weight = batch_shard.share if rows is None else rows
            metric.update_state(value, sample_weight=weight)
    return sum(
        value if loss.weight == 1.0 else value * loss.weight
        for loss, value in zip(found, values)
    )


@contextlib.contextmanager
def of_whole_batch(model):
    """Within it, the losses of a model in parts are those of the batch."""
    adapt_compile_loss(attributes.compile_loss_of(model))
    with adapted_model(model):
        yield


@tf.custom_gradient
def weighed(loss: tf.Tensor, to_log: tf.Tensor, to_minimise: tf.Tensor):
    """The loss times one factor, its gradient times another one."""

    def gradient(upstream):
        return tf.math.multiply_no_nan(upstream, to_minimise), None, None

    return tf.math.multiply_no_nan(loss, to_log), gradient
