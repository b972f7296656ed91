"""The step that replicas run, which knows its shard of the batch."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.layer import adapt_layers
from tfscale.adapters.layer import adapt_to_data
from tfscale.adapters.metric import adapt_metrics
from tfscale.adapters.mirrored_strategy import adapt_replica_context
from tfscale.adapters.model import StagedModel
from tfscale.adapters.model import adapt_compile_loss
from tfscale.adapters.model import adapt_model
from tfscale.adapters.model import is_accumulated
from tfscale.adapters.optimizer import adapt_capturing
from tfscale.adapters.optimizer import optimizers_of
from tfscale.context import step_context
from tfscale.step import batch_norm
from tfscale.step.batch_shard import BatchShard
from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import rank_seeds


def prepared(fn: Callable, is_divided: bool) -> Callable:
    """The function to run in place of a step on shards of a batch.

    Only a step of a model (`model.train_step`) has a known batch. `is_divided`
    says whether replicas have different rows, or all the same.
    """
    model = model_of(fn)
    predicting = attributes.predicting_model(fn)
    if model is not None:
        _check_metrics(model)
        adapt_to_shards(model)
    elif predicting is not None:
        adapt_layers(attributes.flatten_layers(predicting))

    @functools.wraps(fn)
    def step(*args, **kwargs):
        with batch_norm.noting():
            if predicting is not None:
                return _predict(predicting, fn, *args, **kwargs)
            if model is None:
                return fn(*args, **kwargs)
            logs = _run_on_shard(model, fn, is_divided, *args, **kwargs)
            if not is_divided:
                _count_once(model)
            return logs

    return step


def adapt_to_shards(model: keras.Model) -> None:
    """Has a compiled model, its losses and its layers work on shards.

    Layers that `fit` builds are not known before. A pipeline adapts its own.
    """
    adapt_metrics(model)
    if isinstance(model, StagedModel):
        return
    adapt_model(model)
    adapt_compile_loss(attributes.compile_loss_of(model))
    adapt_layers(attributes.flatten_layers(model))
    for optimizer in optimizers_of(model):
        adapt_capturing(optimizer)


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


def _predict(model, fn, *args, **kwargs):
    """Predicts on a shard, which may have no row."""
    data = keras.tree.flatten((args, kwargs))
    adapt_to_data(attributes.flatten_layers(model), data)
    batch_shard = BatchShard.of_replica(data, graph=None)
    with step_context.within(batch_shard=batch_shard):
        return fn(*args, **kwargs)


def _run_on_shard(model, fn, is_divided, *args, **kwargs):
    """Runs a step on a shard, or on rows that all replicas have."""
    data = keras.tree.flatten((args, kwargs))
    data = [each for each in data if each is not None]
    if not data or tf.TensorShape(getattr(data[0], "shape", ())).rank == 0:
        return fn(*args, **kwargs)
    layers = attributes.flatten_layers(model)
    adapt_to_data(layers, data)
    is_of_keras = attributes.is_step_of_keras(
        getattr(model, getattr(fn, "__name__", ""), None)
    )
    accumulates = is_accumulated(model)
    batch_shard = BatchShard.of_replica(
        data,
        layers,
        is_common=not is_divided,
        weighs_loss=is_of_keras or accumulates,
    )
    with step_context.within(batch_shard=batch_shard):
        logs = fn(*args, **kwargs)
        # Logs of microbatches are weighed.
        if not (is_of_keras or accumulates or isinstance(model, StagedModel)):
            logs = keras.tree.map_structure(batch_shard.logged, logs)
    return logs


def on_thread(
    fn: Callable,
    strategy: tf.distribute.Strategy,
    shared: step_context.Shared,
) -> Callable:
    """The function, for threads that call layers in turns, without seeds.

    Outside of functions each draw may have its own generator. A `tf.function`
    is called unchanged. Threads exchange values in the graph of the call.
    """
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
        return fn
    seeded: Callable = contextlib.nullcontext
    if not tf.executing_eagerly():
        seeds = rank_seeds.GlobalSeeds(strategy)
        seeded = functools.partial(attributes.global_seeds, seeds)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        context = tf.distribute.get_replica_context()
        adapt_replica_context(context, layer_losses.kept)
        graph = tf.compat.v1.get_default_graph()
        with (
            seeded(),
            step_context.within(shared=shared),
            step_context.within_ranks(graph=graph),
        ):
            return fn(*args, **kwargs)

    return call


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
        args, kwargs = tf.nest.map_structure(_of_any_rows, (args, kwargs))
        # One edge for each operation, and not one for each input.
        inputs = tf.group(*filter(tf.is_symbolic_tensor, data))
        with tf.control_dependencies([inputs]):
            return fn(*args, **kwargs)

    return run


def _of_any_rows(value):
    """A tensor without rows, as one whose number TensorFlow does not know."""
    if not tf.is_symbolic_tensor(value) or value.shape[:1] != [0]:
        return value
    shape = [None, *value.shape[1:]]
    return tf.compat.v1.placeholder_with_default(value, shape)


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
