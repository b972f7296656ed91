"""The losses given to `compile`, on a shard of a batch."""

from typing import Any

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


def adapt_compile_loss(compile_loss: Any) -> None:
    """Puts the class of this module before a `CompileLoss`'s, if it is one."""
    if compile_loss is not None:
        in_place.put(compile_loss, MeshCompileLoss)
