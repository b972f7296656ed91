"""The losses of a model on a shard of a batch: compiled, or attributes."""

from collections.abc import Iterable
from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale.context import step_context


class MeshCompileLoss(in_place.Mixin):
    """Members that are put before the class of a `CompileLoss`."""

    def call(self, y_true, y_pred, sample_weight=None):
        """See `keras.losses.Loss`: every loss by its divisor."""
        batch_shard = step_context.current().batch_shard_in_graph
        if batch_shard is None:
            return super().call(y_true, y_pred, sample_weight)
        return batch_shard.compiled_loss_of(self, y_true, y_pred, sample_weight)


class MeshLoss(in_place.Mixin):
    """A loss that a layer adds, or that a `train_step` calls by itself."""

    def __call__(self, *args, **kwargs):
        """See `keras.losses.Loss`; a mean counts by the rows it is of."""
        step, call = step_context.current(), super().__call__
        if step.batch_shard is None:
            return call(*args, **kwargs)
        callers = attributes.name_scope_callers()
        if any(isinstance(caller, keras.Layer) for caller in callers):
            with step.batch_shard.within_layer():
                return call(*args, **kwargs)
        if step.batch_shard_in_graph is None:
            return call(*args, **kwargs)
        return step.batch_shard.direct_loss_of(call, args, kwargs)


def adapt_losses(layers: Iterable[keras.Layer]) -> None:
    """Has the losses that are attributes of layers work on shards."""
    for layer in layers:
        for loss in attributes.direct_losses(layer):
            in_place.put(loss, MeshLoss)


def adapt_compile_loss(compile_loss: Any) -> None:
    """Puts the class of this module before a `CompileLoss`'s, if it is one."""
    if compile_loss is not None:
        in_place.put(compile_loss, MeshCompileLoss)
