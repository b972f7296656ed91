"""The loss of a batch from the losses of its shards, exactly.

The mean over a batch is not the mean of its shards' means (replicas,
microbatches) if these differ in rows, sample weights or masks. So each loss of
each shard has a divisor (rows, unmasked elements or sum of weights, by the
loss' reduction), and counts in proportion to it:

    loss of the batch = sum_p divisor_p * loss_p / sum_p divisor_p
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale._internals import symbols

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def precision() -> tf.DType:
    """The dtype of sums of losses and divisors: float32 or float64.

    It is float64 if Keras' `floatx` is.
    """
    return tf.float64 if keras.config.floatx() == "float64" else tf.float32


def num_rows(tensors) -> tf.Tensor:
    """Number of rows of the first tensor, a scalar."""
    first = next(x for x in keras.tree.flatten(tensors) if x is not None)
    return tf.cast(tf.shape(first)[0], precision())


@dataclasses.dataclass(frozen=True)
class CompiledLoss:
    """One loss of some rows of a batch.

    Attributes:
        name: Of the loss.
        value: As Keras reduces it on one device, without its loss weight: a
            scalar, or with `reduction="none"` what is not reduced.
        divisor: Rows, unmasked elements or sum of weights, a scalar of float32;
            1 for a loss that is a sum.
        weight: The loss weight given to `compile`: a number, a variable, or
            None.
        is_sum: Whether the loss of a batch is the sum over shards.
        is_reduced: Whether the loss itself returned a scalar: its divisor is
            then a guess, the rows.
    """

    name: str
    value: tf.Tensor
    divisor: tf.Tensor
    weight: Any
    is_sum: bool
    is_reduced: bool

    @property
    def mean(self) -> tf.Tensor:
        """The scalar that Keras logs."""
        return tf.cast(tf.reduce_mean(self.value), precision())

    @property
    def total(self) -> tf.Tensor:
        """The scalar that is differentiated."""
        return tf.cast(tf.reduce_sum(self.value), precision())

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """The value times the loss weight."""
        if self.weight is None:
            return value
        return keras.ops.multiply(value, self.weight)

    @property
    def is_vector(self) -> bool:
        """Whether it is not reduced: logged as a mean, minimised as a sum."""
        return self.value.shape.rank != 0


def compiled_losses(
    compile_loss, y, y_pred, sample_weight
) -> tuple[CompiledLoss, ...]:
    """Every loss given to `compile`, for some rows of a batch."""
    if compile_loss is None:
        return ()
    found = []

    def record(entry, *args):
        found.append(_compiled_loss(entry, compile_loss.dtype, *args))
        return tf.zeros((), precision())

    # Keras' own code finds out which target, prediction and sample weight go
    # with which loss.
    recording = [
        entry._replace(loss=functools.partial(record, entry), loss_weights=None)
        for entry in attributes.flat_losses(compile_loss)
    ]
    recording_loss = instances.view(
        compile_loss,
        # Keras' own, because the one on a mesh calls this.
        call=compile_loss.__class__.call,
        # Keras' trackers of single losses must not see the zeros.
        metrics=[None] * len(recording),
        **attributes.with_flat_losses(recording),
    )
    recording_loss(y, y_pred, sample_weight)
    if not any(map(keras.tree.is_nested, (y, y_pred))):
        # Of several losses of one output Keras takes the first.
        found = found[:1]
    return tuple(found)


def counts(rows: tf.Tensor) -> tf.Tensor:
    """Weights of shards with these rows in a sum: 0 without any, else 1."""
    return tf.minimum(rows, 1.0)


def log(metrics, values, rows: int | None, share, num_rows: tf.Tensor) -> None:
    """Updates metrics by the losses of a shard, as Keras logs them.

    As in Keras, batches of unknown size count equally here, but for losses that
    are not reduced. `rows` are those that are known.
    """
    if len(values) == 1:
        return  # neither does Keras
    for metric, value in zip(metrics, values):
        weight = share if rows is None else rows
        if value.shape.rank:
            weight = num_rows
        metric.update_state(value, sample_weight=weight)


def warn_of_reduced(losses: Sequence[CompiledLoss]) -> None:
    """Warns of losses that return scalars, if a batch has several shards."""
    for loss in losses:
        if loss.is_reduced:
            warnings.warn(
                "A loss should return a value for each row: parts of a batch "
                "(microbatches, replicas) are put together by what Keras "
                f"divides by. Received: the loss {loss.name!r}, which returns "
                "a scalar. It is taken for a mean over rows, and is not what "
                "it is on one device if it divides by anything else or looks "
                "across rows. Return a value for each row or element and pass "
                "masks as `sample_weight` with "
                "reduction='mean_with_sample_weight', or train on one replica "
                "with `PipelineModel(model, num_microbatches=1)`.",
                stacklevel=2,
            )


def _compiled_loss(entry, dtype, y_true, y_pred, sample_weight):
    loss = entry.loss
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    returned = []
    value = _recording(loss, returned)(y_true, y_pred, sample_weight)
    value = tf.cast(value, dtype)
    masks = [symbols.get_keras_mask(x) for x in (y_pred, *returned)]
    masks = [mask for mask in masks if mask is not None]
    is_reduced = value.shape.rank == 0 and all(
        tf.convert_to_tensor(x).shape.rank == 0 for x in returned
    )
    is_sum = reduction == "sum" and value.shape.rank == 0
    if is_sum:
        divisor = tf.ones((), precision())
    else:
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        weights = None
        if reduction in _MEANS and value.shape.rank == 0:
            weights = mask
        if reduction == "mean_with_sample_weight":
            weights = _masked(_to_float(sample_weight), _to_float(mask))
        if weights is None:
            divisor = num_rows(y_true)
        else:
            divisor = tf.reduce_sum(_to_float(weights))
    return CompiledLoss(
        name=getattr(loss, "name", entry.name),
        value=value,
        divisor=divisor,
        weight=entry.loss_weights,
        is_sum=is_sum,
        is_reduced=is_reduced,
    )


def _masked(weights, mask):
    """Weights of elements, 0 where a mask leaves them out; both may be None."""
    if weights is None or mask is None:
        return mask if weights is None else weights
    # A column may be a vector, as in Keras.
    if weights.shape.rank == mask.shape.rank + 1 and weights.shape[-1] == 1:
        mask = mask[..., tf.newaxis]
    elif mask.shape.rank == weights.shape.rank + 1 and mask.shape[-1] == 1:
        weights = weights[..., tf.newaxis]
    return weights * mask


def _to_float(x):
    return None if x is None else tf.cast(x, precision())


def _recording(loss, returned):
    """The loss; it adds the results of `call`, with masks, to a list.

    With `ignore_class`, only `call` knows which elements count.
    """
    if getattr(loss, "call", None) is None:
        return loss

    def call(self, *args, **kwargs):
        del self
        values = loss.call(*args, **kwargs)
        returned.append(values)
        return values

    return instances.view(loss, call=call)
