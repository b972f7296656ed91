"""The losses of a model on a shard of a batch: compiled, or attributes."""

from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale.step import step_context


class MeshCompileLoss(in_place.Mixin):
    """Members that are put before the class of a `CompileLoss`."""

    def call(self, y_true, y_pred, sample_weight=None):
        """See `keras.losses.Loss`: every loss by its divisor."""
        batch_shard = step_context.current().batch_shard_in_graph
        if batch_shard is None:
            return super().call(y_true, y_pred, sample_weight)
        return batch_shard.compiled_loss_of(self, y_true, y_pred, sample_weight)


class MeshLoss(in_place.Mixin):
    """A loss that a `train_step` calls by itself."""

    def __call__(self, *args, **kwargs):
        """See `keras.losses.Loss`; a mean counts by the rows it is of."""
        batch_shard = step_context.current().batch_shard_in_graph
        if batch_shard is None:
            return super().__call__(*args, **kwargs)
        return batch_shard.direct_loss_of(super().__call__, args, kwargs)


def adapt_losses(model: keras.Model) -> None:
    """Has the losses of a model, compiled and attributes, work on shards."""
    adapt_compile_loss(attributes.compile_loss_of(model))
    for loss in attributes.direct_losses(model):
        in_place.put(loss, MeshLoss)


def adapt_compile_loss(compile_loss: Any) -> None:
    """Puts the class of this module before a `CompileLoss`'s, if it is one."""
    if compile_loss is not None:
        in_place.put(compile_loss, MeshCompileLoss)
