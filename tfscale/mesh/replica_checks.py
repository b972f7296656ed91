"""Checks of what a strategy is to run on replicas, before it runs."""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.adapters.model import StagedModel
from tfscale.step import whole
from tfscale.tensor_parallel import rank_seeds
from tfscale.variables import zero


def check(extended: Any, fn: Callable) -> None:
    """Raises if a function cannot run on the devices of a strategy."""
    extended.layouts.check_all_matched(extended.variable_creator.paths)
    _check_not_compiled(extended, fn)
    _check_has_pipeline(extended, fn)
    _check_divides_weights(extended, fn)


def _check_has_pipeline(extended, fn):
    # Without variables there is nothing to train.
    if extended.config.num_stages == 1 or not extended.variable_creator.paths:
        return
    model = whole.model_of(fn)
    # It checks its variables itself.
    is_pipeline = isinstance(model, StagedModel)
    if not extended.pipelined or any(
        id(variable) not in extended.pipelined and not is_pipeline
        for variable in _trained_by(fn)
    ):
        raise ValueError(
            "A mesh with a 'pipeline' axis needs a `tfscale.PipelineModel`. "
            "Received: `strategy.run`, or `fit`, on a mesh with "
            f"pipeline={extended.config.num_stages}, of a model that was not "
            "cut and would train on one device of each row. Wrap it, "
            "`tfscale.PipelineModel(model, num_microbatches)`, in the "
            "strategy's scope, or make a mesh with data= and model= only."
        )


def _check_divides_weights(extended, fn):
    states = extended.optimizer_states
    if not extended.gathers_weights or states.max_gathered_bytes:
        return
    weights = sorted(
        _trained_by(fn), key=lambda weight: -math.prod(weight.shape)
    )
    # A function of a loop of the user's is of no model.
    paths = [weight.path for weight in weights]
    paths = paths or extended.variable_creator.paths
    if paths:
        raise ValueError(
            "zero_stage=3 needs weights that it can divide: trainable ones of "
            f"at least {zero.MIN_ELEMENTS} elements with a dim that the number "
            f"of replicas divides. Received: {len(paths)} variables, such as "
            f"{paths[0]!r}, and none that {extended.num_replicas} replicas "
            "divide. Use zero_stage=0 for a small model, or name dims in a "
            "layout map: {'.*kernel': ('data', None)}."
        )


def _check_not_compiled(extended, fn):
    if not extended.is_of_several_devices:
        return
    is_compiled = symbols.is_compiled_by_xla(
        tf.compat.v1.get_default_graph()
    ) or (
        extended.ranks_share_function
        and attributes.asks_for_xla(fn)
        and attributes.predicting_model(fn) is None
    )
    if is_compiled:
        count = len(extended.config.first_stage_devices)
        count *= extended.workers.count if extended.workers else 1
        on_host = extended.optimizer_states.are_on_host
        raise ValueError(
            "A `tf.function` with jit_compile=True is compiled for one "
            f"device. Received: `strategy.run`, on a mesh of {count} "
            f"devices{' with slots on the host' * on_host}, in or of such a "
            "function. Pass jit_compile=True to `model.compile` instead: "
            "`fit` compiles the part of each device."
        )


def prepare(fn: Callable) -> None:
    """Lets each replica draw different random numbers in a model.

    Generators created in the scope do so from then on. Raises if a model to be
    trained was created outside of the scope.
    """
    for variable in _trained_by(fn):
        check_in_scope(variable)
    model = whole.model_of(fn)
    for generator in rank_seeds.generators(model) if model else ():
        rank_seeds.attach(generator)


def _trained_by(fn):
    """The weights of the model that a function trains."""
    model = whole.model_of(fn)
    if model is None or getattr(fn, "__name__", "") != "train_step":
        return []
    return model.trainable_variables


def check_in_scope(variable: keras.Variable | tf.Variable) -> None:
    """Raises if replicas share a variable, and would race."""
    name, value = variable.name, variable
    if isinstance(variable, keras.Variable):
        name, value = variable.path, attributes.value_of(variable)
    if not isinstance(value, tf.distribute.DistributedValues):
        raise ValueError(
            "Everything that trains under a strategy must be created in its "
            f"scope. Received: {name!r}, created outside. Put the code that "
            "creates variables, also `enable_lora`, under `with "
            "strategy.scope():`."
        )
