"""Refuses, or warns of, what parameter servers do not train or log."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.callbacks import BackupAndRestore
from tfscale.callbacks import GradientAccumulation
from tfscale.callbacks import GradientNoiseScale
from tfscale.mesh.update.optimizer_checks import NOT_ELEMENTWISE
from tfscale.optimizers.lars import LARS
from tfscale.parameter_server.strategy import ParameterServerStrategy

_NOT_ELEMENTWISE = (LARS, *NOT_ELEMENTWISE)
_OF_STEPS = (BackupAndRestore, GradientAccumulation, GradientNoiseScale)


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuses any but a `ParameterServerStrategy`."""
    if not isinstance(strategy, ParameterServerStrategy):
        raise ValueError(
            "`ParameterServerModel` must be made in the scope of a "
            "`tfscale.ParameterServerStrategy`. Received: "
            f"{type(strategy).__name__}. Use `with strategy.scope():`; a "
            "`MeshStrategy` trains a plain model or a `PipelineModel`."
        )


def check_model(model: Any) -> None:
    """Refuses an object that is no model, or a model not on the servers."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a Keras model. Received: {type(model).__name__}."
        )
    if isinstance(getattr(model, "model", None), keras.Model):
        raise ValueError(
            "A model can be wrapped only once, for parameter servers or as a "
            f"pipeline. Received: a {type(model).__name__}. Wrap its `model`."
        )
    if not model.built:
        raise ValueError(
            "A model must be built before it is wrapped, so that its "
            f"variables are on the servers. Received: {model.name!r}, which "
            "is not. Begin it with a `keras.Input`, or call `build`."
        )
    _check_on_servers(model.variables, "the model")


def check_variables(
    model: keras.Model, wrapped: Iterable[keras.Variable]
) -> None:
    """Refuses other variables than those that a model was wrapped with.

    Functions that were traced would go on with those.
    """
    ids, now = {id(v) for v in wrapped}, {id(v) for v in model.weights}
    if ids != now:
        path = next(
            v.path for v in [*model.weights, *wrapped] if id(v) in ids ^ now
        )
        raise ValueError(
            "The variables of a wrapped model must stay the same, because "
            "workers run functions traced with them. Received: "
            f"{model.name!r}, whose variable {path!r} was created or removed "
            "later. Call `enable_lora`, `quantize` and the like before "
            "wrapping, in the scope of the strategy, or wrap the model again."
        )


def check_steps(run_eagerly: bool, jit_compile: Any) -> None:
    """Refuses steps that workers cannot run."""
    if run_eagerly:
        raise ValueError(
            "Workers cannot run eagerly. Received: run_eagerly=True. Remove "
            "it; to debug a step, run it without parameter servers."
        )
    if jit_compile not in ("auto", False, None):
        raise ValueError(
            "XLA cannot compile a step whose variables are in other "
            f"processes. Received: jit_compile={jit_compile!r}. Remove it."
        )


def check_optimizer(model: keras.Model) -> None:
    """Refuses an optimizer that would be wrong.

    It may rely on the order of steps, be created outside of the scope, or use
    whole tables that are sharded.
    """
    optimizer = model.optimizer
    if optimizer is None:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Loss scaling needs steps in sequence, and workers run theirs "
            "concurrently. Received: a LossScaleOptimizer, or the policy "
            "'mixed_float16', which makes one. Use 'mixed_bfloat16'."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "Gradient accumulation needs steps in sequence, and workers run "
            "theirs concurrently. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}. Use larger batches."
        )
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ValueError(
            "`ema_overwrite_frequency` is not supported: workers do not see "
            "every value of `iterations`. Received: ema_overwrite_frequency="
            f"{optimizer.ema_overwrite_frequency}. Remove it: averages replace "
            "the weights at the end of `fit`."
        )
    _check_on_servers(optimizer.variables, f"the optimizer {optimizer.name!r}")
    if optimizer.clipnorm or isinstance(optimizer, _NOT_ELEMENTWISE):
        _check_no_shards(model, optimizer)


def _check_no_shards(model, optimizer):
    for layer in attributes.flatten_layers(model):
        if (getattr(layer, "num_shards", None) or 1) > 1:
            raise ValueError(
                "An optimizer that uses a norm, or the rows and columns, of a "
                "variable needs the whole variable. Received: "
                f"{type(optimizer).__name__} with "
                f"clipnorm={optimizer.clipnorm}, and {layer.name!r} in "
                f"{layer.num_shards} shards. Use `global_clipnorm` or "
                "`clipvalue`, an elementwise optimizer, or num_shards=1."
            )


def check_callbacks(callbacks: Any) -> None:
    """Refuses callbacks that rely on the order of steps."""
    for callback in keras.tree.flatten(callbacks or []):
        if isinstance(callback, _OF_STEPS):
            raise ValueError(
                "A callback that saves, accumulates or measures between two "
                "steps needs steps in sequence, and workers run theirs "
                f"concurrently. Received: {type(callback).__name__}. To "
                "continue after a failure use "
                "`keras.callbacks.ModelCheckpoint`, which saves between "
                "epochs."
            )


def check_no_class_weight(class_weight: Any) -> None:
    """Refuses weights of classes if workers create their data."""
    if class_weight is not None:
        raise ValueError(
            "`class_weight` applies to a dataset, and not to a function that "
            f"returns one per worker. Received: class_weight={class_weight}. "
            "Let the function return (x, y, sample_weight)."
        )


def check_training_data(x: Any, steps_per_epoch: int | None) -> None:
    """Refuses data that several workers cannot train on."""
    if not isinstance(x, tf.data.Dataset):
        raise ValueError(
            "`fit` on parameter servers needs a `tf.data.Dataset`, which each "
            f"worker iterates. Received: {type(x).__name__}. Use "
            "`tf.data.Dataset.from_tensor_slices((x, "
            "y)).shuffle(len(x)).repeat().batch(batch_size)`."
        )
    if not steps_per_epoch:
        raise ValueError(
            "`fit` on parameter servers needs `steps_per_epoch`. Received: no "
            "`steps_per_epoch`."
        )
    cardinality = int(x.cardinality())
    if cardinality >= 0:  # neither infinite nor unknown
        raise ValueError(
            "A training dataset on parameter servers must not end, because "
            "the number of steps of each worker is not known. Received: one "
            f"of {cardinality} batches. End it in `.repeat()`."
        )


def check_metrics(metrics: Iterable[keras.Metric]) -> None:
    """Refuses metrics that are no sums over steps."""
    for metric in metrics:
        for variable in metric.variables:
            if np.any(variable.numpy()):
                raise ValueError(
                    "A metric's variables must begin at zero and each step "
                    "must add to them, so that workers' values can be summed. "
                    f"Received: {metric.name!r}, whose {variable.name!r} "
                    f"begins at {variable.numpy()}."
                )


def warn_of_unlogged(logs: Any, results: Iterable[str]) -> None:
    """Warns of what a step returns that has not the name of a metric."""
    names = {*logs} - {*results} if isinstance(logs, dict) else set()
    if names:
        warnings.warn(
            "Only metrics of a step on a worker are logged, by their names. "
            "Received: a step that returns "
            f"{', '.join(map(repr, sorted(names)))}. Give the model a "
            "`keras.metrics.Mean` of that name, and update it in the step.",
            stacklevel=2,
        )


def _check_on_servers(variables, of):
    for variable in variables:
        device = getattr(attributes.value_of(variable), "device", "")
        if "/job:ps" not in device:
            raise ValueError(
                "All variables must be on parameter servers, where workers "
                f"find them. Received: {variable.path!r} of {of}, on "
                f"{device!r}. Create {of} in the scope of the strategy."
            )
