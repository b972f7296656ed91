"""The loss of a batch out of those of its microbatches, exactly.

A mean over a batch is not the mean of the means over its microbatches when
these differ in size, in sample weights or in masks. So every loss of every
microbatch comes with its divisor (rows, unmasked elements or sum of weights,
as the reduction of the loss wants it), and counts in proportion to it:

    loss of the batch = sum_m divisor_m * loss_m / sum_m divisor_m
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from tfscale import _internals

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def num_rows(tensors) -> tf.Tensor:
    """Number of rows of the first of some tensors, a scalar of float32."""
    return tf.cast(tf.shape(keras.tree.flatten(tensors)[0])[0], tf.float32)


@dataclasses.dataclass(frozen=True)
class CompiledLoss:
    """One loss of a microbatch.

    Attributes:
        value: As Keras reduces it, without its loss weight: a scalar of
            float32.
        divisor: Rows, unmasked elements or sum of weights behind `value`: a
            scalar of float32. 1 for a loss that is a sum.
        weight: The loss weight given to `compile`.
        is_sum: Whether the loss of a batch is the sum over microbatches.
    """

    value: tf.Tensor
    divisor: tf.Tensor
    weight: float
    is_sum: bool


def compiled_losses(
    compile_loss, y, y_pred, sample_weight
) -> tuple[CompiledLoss, ...]:
    """Every loss given to `compile`, of one microbatch.

    Args:
        compile_loss: The model's `CompileLoss`, built, or None.
        y: Targets, in the structure that the user gave.
        y_pred: Predictions, in the structure of the model's outputs.
        sample_weight: None, one tensor, or one for each output.
    """
    if compile_loss is None:
        return ()
    found = []

    def recorder(entry):
        def record(*args):
            found.append(_compiled_loss(entry, *args))
            return tf.zeros(())

        return record

    # Keras' own code finds out which target, prediction and sample weight go
    # with which loss.
    recording = [
        entry._replace(loss=recorder(entry), loss_weights=None)
        for entry in _internals.flat_losses(compile_loss)
    ]
    view = _view(compile_loss, **_internals.with_flat_losses(recording))
    # Its trackers of the single losses are not to see the zeros.
    with keras.StatelessScope():
        view(y, y_pred, sample_weight)
    return tuple(found)


def _view(instance, **members):
    """The same object, state and all, but for some members.

    The object itself must not change, not even for as long as it is called:
    model ranks call it at the same time, one going on where another one waits.
    """
    kind = type(type(instance).__name__, (type(instance),), members)
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", instance.__dict__)
    return view


def _compiled_loss(entry, y_true, y_pred, sample_weight):
    loss = entry.loss
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    is_sum = reduction not in _MEANS
    recorded = []
    value = _recording_masks(loss, recorded)(y_true, y_pred, sample_weight)
    value = tf.reduce_sum(tf.cast(value, tf.float32))
    masks = [_internals.get_keras_mask(y_pred), *recorded]
    masks = [mask for mask in masks if mask is not None]
    if is_sum:
        divisor = tf.ones(())
    else:
        # Keras divides a mean by the number of replicas.
        value = _internals.unscale_loss_for_distribution(value)
        mask = functools.reduce(tf.logical_and, masks) if masks else None
        weights = mask
        if reduction == "mean_with_sample_weight":
            weights = _internals.apply_mask(
                _to_float(sample_weight), mask, "float32", reduction
            )
        if weights is None:
            divisor = num_rows(y_true)
        else:
            divisor = tf.reduce_sum(_to_float(weights))
    return CompiledLoss(
        value=value,
        divisor=divisor,
        weight=1.0 if entry.loss_weights is None else entry.loss_weights,
        is_sum=is_sum,
    )


def _to_float(x):
    return None if x is None else tf.cast(x, tf.float32)


def _recording_masks(loss, masks):
    """The loss, which adds to a list the mask that `call` puts on its values.

    With `ignore_class`, say: which elements count is known inside only.
    """
    if getattr(loss, "call", None) is None:
        return loss

    def call(self, *args, **kwargs):
        del self
        values = loss.call(*args, **kwargs)
        mask = _internals.get_keras_mask(values)
        if mask is not None:
            masks.append(mask)
        return values

    return _view(loss, call=call)
