"""Updates of weights by slots, or of slots by weights, outside of replicas.

`strategy.extended.update(weight, fn, args=(slot,))` calls `fn` for each device
with the whole weight and, with sharded slots, a shard of the slot. Here `fn`
gets the same shard of the weight, and replicas gather the updated shards.
`keras.callbacks.SwapEMAWeights` swaps weights with averages in this way.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.context import step_context
from tfscale.variables import zero
from tfscale.variables.local_shard import shard_key
from tfscale.variables.variable import MeshVariable


def update_local_shards(
    update: Callable,
    optimizer_states: zero.OptimizerStateSharding,
    var: Any,
    fn: Callable,
    args: Any,
    kwargs: Any,
    group: bool,
) -> Any:
    """Calls `update` of an `extended`; gives `fn` shards of the same size."""
    weights = _weights_of_slots((var, args, kwargs))
    if not weights:
        return update(var, fn, args, kwargs, group)

    def local(value):
        is_weight = any(value is weight for weight in weights)
        return optimizer_states.local_shard(value) if is_weight else value

    def fn_of_shards(component, *args, **kwargs):
        if any(var is weight for weight in weights):
            component = optimizer_states.local_shard(var)
        args, kwargs = tf.nest.map_structure(local, (args, kwargs))
        return fn(component, *args, **kwargs)

    noted = step_context.Update()
    with step_context.within(update=noted):
        result = update(var, fn_of_shards, args, kwargs, group)
    for weight in weights:
        keys = [shard_key(weight, i) for i in range(len(weight.values))]
        if keys[0] in noted.new_shards:
            new_shards = [noted.new_shards[key] for key in keys]
            optimizer_states.all_gather_outside(weight, new_shards)
    return result


def _weights_of_slots(values):
    """The weights that are whole on every replica, with a sharded slot."""
    variables = [
        value
        for value in tf.nest.flatten(values)
        if isinstance(value, MeshVariable)
    ]
    shapes = [v.sharding.shape for v in variables if zero.is_divided(v)]
    return [
        v
        for v in variables
        if not zero.is_divided(v) and v.sharding.shape in shapes
    ]
