"""Checks that a model can be accumulated, before anything runs."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.model import StagedModel


def check_rows(element_spec: Any, num_microbatches: int) -> None:
    """Raises if batches are known to have fewer rows than microbatches.

    A last batch that is smaller than the others has fewer microbatches.
    """
    for spec in keras.tree.flatten(element_spec):
        shape = getattr(spec, "shape", None)
        if not shape or shape[0] is None or shape[0] >= num_microbatches:
            continue
        raise ValueError(
            "A batch must have a row for each microbatch. Received: "
            f"num_microbatches={num_microbatches} and batches of {shape[0]} "
            f"rows (of each replica). Set num_microbatches to {shape[0]} or "
            "less, or make batches larger."
        )


def check_updates(
    model: keras.Model, changed: Iterable[keras.Variable]
) -> None:
    """Raises if a step changed weights other than by the optimizer.

    Another optimizer may, if it is stored where it is not found.
    """
    weights = {id(variable) for variable in model.trainable_variables}
    for variable in changed:
        if id(variable) in weights:
            by = f"an `assign` to {variable.path!r}"
        # Each optimizer counts its updates; those of TensorFlow change weights
        # unseen by scopes of Keras.
        elif variable.name == "iteration":
            by = f"another optimizer, {variable.path.split('/')[0]!r}"
        else:
            continue
        raise ValueError(
            "With GradientAccumulation the optimizer that was given to "
            "`compile` must be the only one that changes weights in "
            f"`train_step`. Received: {by}, which would do so in each "
            "microbatch. Do it in a callback between steps; or remove "
            "GradientAccumulation, and add up the gradients of parts of the "
            "batch in `train_step`, as docs/accumulation.md does for two "
            "optimizers."
        )


def check(model: keras.Model) -> None:
    """Raises a TypeError or ValueError if steps cannot run in microbatches."""
    if isinstance(model, StagedModel):
        raise ValueError(
            "A `PipelineModel` accumulates by itself. Received: "
            f"GradientAccumulation for the pipeline {model.name!r}. Remove the "
            "callback, and set `num_microbatches` of the "
            "`PipelineModel`."
        )
    if model.optimizer is None:
        raise ValueError(
            "GradientAccumulation takes the gradients that `train_step` gives "
            "to the optimizer of `compile`. Received: a model compiled "
            "without one. Pass `optimizer` to `compile`."
        )
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "Gradients can be accumulated by GradientAccumulation or by the "
            "optimizer. Received: both, gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}. Remove it."
        )
    for layer in attributes.flatten_layers(model):
        if getattr(layer, "synchronized", False):
            raise ValueError(
                "A layer cannot be synchronized over microbatches, which run "
                f"one after the other. Received: {layer.name!r}, with "
                "synchronized=True. Remove it."
            )
        if getattr(layer, "stateful", False):
            raise ValueError(
                "A layer cannot hand a state for each row on to the next "
                "microbatch, which has other rows. Received: "
                f"{layer.name!r}, with stateful=True. Remove it."
            )
    _check_strategy(model, inner)


def _check_strategy(model, inner):
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    # With one replica too: their loop has no device for what it sums up.
    others = (
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    )
    is_other = isinstance(strategy, others)
    if hasattr(strategy, "mesh") or (replicas == 1 and not is_other):
        return
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise TypeError(
            "GradientAccumulation works without a strategy, under "
            "`tfscale.MeshStrategy` and under `tf.distribute.MirroredStrategy`."
            f" Received: {type(strategy).__name__}. Use "
            "`tfscale.MeshStrategy`."
        )
    if inner is not model.optimizer:
        raise ValueError(
            "Under MirroredStrategy each replica decides by itself whether "
            "gradients are finite. Received: a LossScaleOptimizer, on "
            f"{replicas} replicas. Use `tfscale.MeshStrategy`, which sums "
            "them first."
        )
    if inner.clipnorm or inner.global_clipnorm or inner.clipvalue:
        raise ValueError(
            "Under MirroredStrategy gradients are clipped before they are "
            "summed over replicas. Received: an optimizer that clips, on "
            f"{replicas} replicas. Use `tfscale.MeshStrategy`, which clips "
            "the sum."
        )
