"""The step that replicas run, which knows its shard of the batch."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.layer import adapt_layers
from tfscale.adapters.loss import adapt_compile_loss
from tfscale.adapters.loss import adapt_losses
from tfscale.adapters.metric import adapt_metrics
from tfscale.adapters.model import adapt_model
from tfscale.context import step_context
from tfscale.step import batch_norm
from tfscale.step.batch_shard import BatchShard
from tfscale.step.checks import across_rows
from tfscale.step.checks import changed_gradients
from tfscale.step.checks import layer_state


def prepared(fn: Callable, is_divided: bool) -> Callable:
    """The function to run in place of a step on shards of a batch.

    Only a step of a model (`model.train_step`) has a known batch. `is_divided`
    says whether replicas have different rows, or all the same.
    """
    model = model_of(fn)
    predicting = attributes.predicting_model(fn)
    replica_data: list[Any] | None = [] if is_divided else None
    if model is not None:
        _check_metrics(model)
        adapt_metrics(model, are_on_replicas=True)
        adapt_to_shards(model)
    elif predicting is not None:
        adapt_layers(attributes.flatten_layers(predicting))

    @functools.wraps(fn)
    def step(*args, **kwargs):
        with batch_norm.noting():
            if predicting is not None and replica_data is not None:
                return _predict(predicting, fn, replica_data, *args, **kwargs)
            if model is None:
                return fn(*args, **kwargs)
            logs = _run_on_shard(model, fn, replica_data, *args, **kwargs)
            if not is_divided:
                _count_once(model)
            return logs

    return step


def adapt_to_shards(model: keras.Model) -> None:
    """Has a compiled model, its losses and its layers work on shards.

    Layers that `fit` builds are not known before.
    """
    adapt_model(model)
    adapt_compile_loss(attributes.compile_loss_of(model))
    layers = attributes.flatten_layers(model)
    adapt_losses(layers)
    adapt_layers(layers)


def _check_metrics(model):
    for variable in model.metrics_variables:
        if not isinstance(variable.value, tf.distribute.DistributedValues):
            raise ValueError(
                "Metrics must be made in the scope of the strategy, because "
                "each replica counts by itself. Received: one with the "
                f"variable {variable.path!r}, made outside of the scope: all "
                "replicas would count in it together. Put what makes it, and "
                "`compile`, under `with strategy.scope():`."
            )


def _count_once(model):
    """Has the first replica count a batch that all of them have."""
    context = tf.distribute.get_replica_context()
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    for variable in model.metrics_variables:
        if variable.aggregation == "sum":
            value = tf.convert_to_tensor(variable)
            variable.assign(tf.where(is_first, value, tf.zeros_like(value)))


def _predict(model, fn, replica_data, *args, **kwargs):
    """Predicts, and warns of a model that mixes the rows of a replica."""
    data = keras.tree.flatten((args, kwargs))
    replica_data.append(data)
    batch_shard = BatchShard.of_replica(data, has_loss=False)
    with step_context.within(batch_shard=batch_shard):
        outputs = fn(*args, **kwargs)
    others = [x for each in replica_data if each is not data for x in each]
    across_rows.check(model, data, outputs, others, in_predict=True)
    return outputs


def _run_on_shard(model, fn, replica_data, *args, **kwargs):
    """Runs a step on a shard, which joins those of the other replicas."""
    data = keras.tree.flatten((args, kwargs))
    if not data or tf.TensorShape(getattr(data[0], "shape", ())).rank == 0:
        return fn(*args, **kwargs)
    layers = attributes.flatten_layers(model)
    is_common = replica_data is None
    batch_shard = BatchShard.of_replica(
        data,
        layers,
        is_common=is_common,
        is_of_keras=attributes.is_step_of_keras(
            model, getattr(fn, "__name__", "")
        ),
    )
    if replica_data is not None and batch_shard.num_replicas > 1:
        batch_shard.changes = layer_state.Changes(model, data, replica_data)
    with step_context.within(batch_shard=batch_shard):
        logs = fn(*args, **kwargs)
        logs = keras.tree.map_structure(batch_shard.logged, logs)
    if batch_shard.changes is not None:
        batch_shard.changes.warn()
    return logs


def with_input_dependencies(fn: Callable) -> Callable:
    """A function whose operations all wait for its inputs.

    At the end of a dataset whose batches have a static shape Keras takes one
    more, which fails. Operations that only use its shape would still run: the
    optimizer would count a step, and metrics a batch without a loss.

    In `predict` TensorFlow may know that a replica has no rows, for which
    layers are not written (Keras adds a tensor without rows as a bias).
    """
    if tf.executing_eagerly():
        return fn

    @functools.wraps(fn)
    def run(*args, **kwargs):
        data = tf.nest.flatten((args, kwargs), expand_composites=True)
        if any(map(_has_no_rows, data)):
            args, kwargs = tf.nest.map_structure(_of_any_rows, (args, kwargs))
        with tf.control_dependencies(list(filter(tf.is_symbolic_tensor, data))):
            return fn(*args, **kwargs)

    return run


def _has_no_rows(value):
    return tf.is_symbolic_tensor(value) and value.shape[:1] == [0]


def _of_any_rows(value):
    """A tensor whose number of rows TensorFlow does not know."""
    if not _has_no_rows(value):
        return value
    shape = [None, *value.shape[1:]]
    return tf.compat.v1.placeholder_with_default(value, shape)


def checking_gradients(fn: Callable) -> Callable:
    """Has a function warn of what its `train_step` does to local gradients."""
    model = model_of(fn)
    if model is None or model.__class__.train_step is keras.Model.train_step:
        return fn

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with changed_gradients.explained(model.trainable_variables):
            logs = fn(*args, **kwargs)
        changed_gradients.warn_of_logged(
            logs,
            "a replica or of a model rank",
            "Sum them before, `tfscale.sum_gradients(gradients, variables)`, "
            "and log what is made of the sums.",
        )
        return logs

    return run


def model_of(fn: Callable) -> keras.Model | None:
    """The compiled model that a function is a method of, or None."""
    found: Any = fn
    while found is not None:
        model = getattr(found, "__self__", None)
        if isinstance(model, keras.Model):
            return model if model.compiled else None
        # TensorFlow wraps functions that it may have to convert.
        found = getattr(found, "__wrapped__", None)
    return None
