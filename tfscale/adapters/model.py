"""A model of a mesh: its steps, its losses, and who saves it."""

import os
from typing import Any

import keras

from tfscale._internals import fitting
from tfscale._internals import in_place
from tfscale.adapters.layer import MeshLayer
from tfscale.context import step_context


class MeshModel(MeshLayer):
    """Members that are put before the class of a model."""

    # The `ModelCall` of a model that runs by plans.
    sequence_call: Any = None

    def call(self, *args, **kwargs):
        """See `keras.Model`; by the plan for its inputs on ranks."""
        shared = step_context.current().shared.call
        if shared is not None and shared.model is self:
            return shared.run(super().call, args, kwargs)
        if self.sequence_call is None:
            return super().call(*args, **kwargs)
        return self.sequence_call.run(super().call, *args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        """See `keras.Model.compute_loss`; on a shard of a batch."""
        batch_shard = step_context.current().batch_shard_in_graph
        if batch_shard is None or batch_shard.compiled is not None:
            return super().compute_loss(*args, **kwargs)
        return batch_shard.loss_of(super().compute_loss, args, kwargs)

    def save(self, filepath, *args, **kwargs):
        """See `keras.Model.save`; raises if another worker saves there."""
        _check_writes(self, filepath)
        super().save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """See `keras.Model.save_weights`; one worker writes the file."""
        _check_writes(self, filepath)
        super().save_weights(filepath, *args, **kwargs)


class MeshCompileLoss(in_place.Mixin):
    """A `CompileLoss`, the losses given to `compile`, on a shard of a batch."""

    def call(self, y_true, y_pred, sample_weight=None):
        """See `keras.losses.Loss`: every loss by its divisor."""
        batch_shard = step_context.current().batch_shard_in_graph
        if batch_shard is None:
            return super().call(y_true, y_pred, sample_weight)
        return batch_shard.compiled_loss_of(self, y_true, y_pred, sample_weight)


class StagedModel(keras.Model):
    """A pipeline, whose class is in a higher layer; its steps are its own."""


class SpecBuiltModel(in_place.Mixin):
    """A model that is built from specs, where Keras may draw no batch for it.

    A batch of a pipeline would begin an epoch. One of a generator would be
    lost, and one of a `PyDataset` would start its workers.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """See `keras.Model`; by the specs of a batch, if they do."""
        if iterator is not None and not fitting.is_probed(iterator):
            data_batch, iterator = fitting.element_spec_of(iterator), None
        super()._maybe_symbolic_build(iterator, data_batch)


class AccumulatedModel(MeshModel):
    """A model whose steps run in microbatches."""

    # The last `Accumulation` of the model.
    tfscale_accumulation: Any = None

    def train_step(self, data):
        """See `keras.Model.train_step`; in replica context."""
        if not is_accumulated(self):
            return super().train_step(data)
        train_step = super().train_step
        return self.tfscale_accumulation.train_step(self, train_step, data)


def is_accumulated(model: keras.Model) -> bool:
    """Whether a `GradientAccumulation` runs the step."""
    accumulation = getattr(model, "tfscale_accumulation", None)
    return accumulation is not None and accumulation.is_running


def _check_writes(model, filepath):
    workers = getattr(model.distribute_strategy.extended, "workers", None)
    if workers is None:
        return
    path = str(filepath)
    if "://" not in path:
        path = os.path.abspath(path)
    writer = workers.coordination.first_to_claim(path)
    if writer != workers.index:
        raise ValueError(
            "Only one worker may write a file, because all workers have the "
            f"same weights. Received: a save to {path!r} in worker "
            f"{workers.index}; the file belongs to worker {writer}. Save under "
            "`if strategy.is_chief:`, and pass callbacks that save to that "
            "worker only; or put the worker's index into the name of the file."
        )


def adapt_model(model: keras.Model, **attributes: Any) -> None:
    """Has a model compute and save on a mesh."""
    in_place.put(model, MeshModel, **attributes)


def adapt_compile_loss(compile_loss: Any) -> None:
    """Has the losses given to `compile`, if there are some, know shards."""
    if compile_loss is not None:
        in_place.put(compile_loss, MeshCompileLoss)


def adapt_spec_built_model(model: keras.Model) -> None:
    """Has a model be built without a batch, for data that says so."""
    in_place.put(model, SpecBuiltModel)


def adapt_accumulated_model(model: keras.Model) -> None:
    """Has a model ask its last `Accumulation` how a step runs."""
    in_place.put(model, AccumulatedModel)
