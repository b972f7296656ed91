"""Refuses optimizers that would be wrong with sharded slots."""

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import layers
from tfscale.graphs import random_operations
from tfscale.graphs import walks
from tfscale.mesh.update import optimizer_trial
from tfscale.optimizers.lars import LARS

# Their updates need the whole of a variable.
NOT_ELEMENTWISE = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)

# Custom optimizers that were tried; each is tried once.
_TRIED: weakref.WeakSet[keras.Optimizer] = weakref.WeakSet()


def check(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    extended: Any,
) -> None:
    """Refuses an optimizer that cannot update shards by themselves."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    shardings = [extended.optimizer_states.sharding_of(v) for v in variables]
    sharded = [v for v, s in zip(variables, shardings) if s.is_sharded]
    if not sharded:
        return
    if isinstance(inner, NOT_ELEMENTWISE):
        raise ValueError(
            "An optimizer with sharded slots must be elementwise. Received: "
            f"{type(inner).__name__}, which needs whole variables. Use AdamW, "
            "Lion, SGD or another elementwise one, or shard no variables and "
            "no slots."
        )
    if isinstance(inner, LARS) and inner is not optimizer:
        raise ValueError(
            "LARS needs the norms of whole variables before it is known "
            "whether a step is finite. Received: LARS in a "
            "LossScaleOptimizer, and variables that are sharded. Use "
            "`mixed_bfloat16`, which needs no loss scaling, or shard nothing, "
            "by a layout map or a zero_stage."
        )
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "Slots can be sharded, over model ranks or by a zero_stage, "
            "under one optimizer for all variables. Received: a "
            "MultiOptimizer, whose parts would each clip by itself. Use one "
            "of its optimizers for all."
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` does not work where slots are "
            "sharded, over model ranks or by a zero_stage. Received: "
            f"{inner.gradient_accumulation_steps}. Remove it, make batches "
            "that many times as large, and pass the callback "
            "`tfscale.callbacks.GradientAccumulation(num_microbatches="
            f"{inner.gradient_accumulation_steps})` to `fit`."
        )
    constrained = [
        v.path for v in sharded if getattr(v, "constraint", None) is not None
    ]
    if inner is not optimizer and constrained:
        raise ValueError(
            "Variables with a constraint whose slots are sharded cannot be "
            f"trained with loss scaling. Received: {constrained[0]!r}. Use "
            "`mixed_bfloat16`, or neither divide the variable in the layout "
            "map nor set a zero_stage."
        )
    _check_custom(inner, shardings)


def check_draws(
    optimizer: keras.Optimizer, graph: tf.Graph, version: int
) -> None:
    """Refuses an optimizer whose replicas draw different random numbers."""
    if not graph.building_function:
        return
    graph_def = graph.as_graph_def(from_version=version)
    library = {f.signature.name: f.node_def for f in graph_def.library.function}
    called = walks.reachable(
        walks.called_functions(graph_def.node, library),
        lambda name: walks.called_functions(library[name], library),
    )
    bodies = (library[name] for name in called)
    for node in itertools.chain(graph_def.node, *bodies):
        if random_operations.draws_from_state(node.op):
            raise ValueError(
                "An optimizer must update all replicas of a variable by the "
                f"same numbers. Received: {optimizer.__class__.__name__}, "
                "which draws different random numbers on each replica, by "
                f"{node.op}. Draw by `keras.random` with a `seed`: a "
                "`keras.random.SeedGenerator`, an attribute of the optimizer."
            )


def _check_custom(optimizer, shardings):
    kind = optimizer.__class__
    if (
        optimizer in _TRIED
        or layers.is_of_keras(kind)
        or isinstance(optimizer, LARS)
    ):
        return
    try:
        is_right = optimizer_trial.is_elementwise(optimizer, shardings)
    except Exception as error:
        is_right = True
        warnings.warn(
            "An optimizer whose slots are sharded must update each element by "
            f"itself. Received: {kind.__name__}, which could not be tried "
            f"({type(error).__name__}: {error}). Give it a `get_config` "
            "from which `from_config` makes a copy.",
            stacklevel=2,
        )
    if not is_right:
        raise ValueError(
            "An optimizer with sharded slots must be elementwise. Received: "
            f"{kind.__name__}, whose update of half of a variable differed on "
            "a trial: it uses whole variables or gradients, or draws random "
            "numbers. Use `clipnorm` or `global_clipnorm`, change gradients "
            "in a `train_step` after `tfscale.sum_gradients`, or shard no "
            "variables and no slots."
        )
    _TRIED.add(optimizer)
