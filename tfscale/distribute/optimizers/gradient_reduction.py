"""Sums gradients over replicas, and scatters those whose slots are sharded."""

import functools
from typing import Any

import tensorflow as tf

from tfscale.distribute.fully_sharded import gather_again
from tfscale.distribute.replica_function import check_in_scope
from tfscale.distribute.variables import zero
from tfscale.sharding.shards import shard
from tfscale.whole_batch import batch_norm


def sum_over_replicas(extended: Any, gradients, variables) -> list:
    """Gradients summed over the replicas; in replica context.

    For a variable with sharded slots it is this replica's shard.
    """
    for variable in variables:
        check_in_scope(variable)
    states, sums = extended.optimizer_states, list(gradients)
    if not extended.has_several_replicas:
        return sums
    if states.are_weights_sharded:
        gather_again.gather_again()
    dims: list[Any] = [states.dim_of(variable) for variable in variables]
    given = [i for i, value in enumerate(gradients) if value is not None]
    whole = [i for i in given if dims[i] is None]
    divided = [i for i in given if dims[i] is not None]
    context = tf.distribute.get_replica_context()

    def dense(indices):
        return [tf.convert_to_tensor(gradients[i]) for i in indices]

    # Not by `context.all_reduce`, which would move the gradients of all stages
    # to one device.
    all_reduce = functools.partial(context.merge_call, _sums)
    found = batch_norm.all_sums_and_statistics(all_reduce, dense(whole))
    for i, total in zip(whole, found):
        sums[i] = total
    scattered = zero.reduce_scatter(
        dense(divided),
        [
            None
            if _is_local_shard(states, gradients[i], variables[i])
            else dims[i]
            for i in divided
        ],
    )
    for i, total in zip(divided, scattered):
        sums[i] = total
    if extended.gradient_noise is not None:
        extended.gradient_noise.of_replicas(
            gradients, sums, variables, extended
        )
    return sums


def scatter_microbatch(extended: Any, gradients, variables, weight) -> list:
    """Gradients of a microbatch times `weight`, reduce-scattered over replicas.

    With `zero_stage=3` the tape has done so for sharded weights.
    """
    states = extended.optimizer_states
    found, dims = list(gradients), {}
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        if gradient is None or zero.is_divided(variable):
            continue
        factor = tf.cast(weight, gradient.dtype)
        found[i] = tf.math.multiply_no_nan(gradient, factor)
        dim = states.dim_of(variable)
        if dim is not None:
            dims[i] = dim
    shards = zero.reduce_scatter_here(
        [found[i] for i in dims], list(dims.values())
    )
    for i, gradient in zip(dims, shards):
        shape = states.sharding_of(variables[i]).local_shape
        found[i] = tf.ensure_shape(gradient, shape)
    return found


def shard_gradient(extended: Any, gradient, variable) -> tf.Tensor:
    """This device's shard of a gradient that all devices have whole.

    It is what `apply_sums` takes; see `adapters/optimizer.py`.
    """
    sharding = extended.optimizer_states.sharding_of(variable)
    return shard(gradient, sharding, *extended.replica_and_rank())


def _is_local_shard(states, gradient, variable):
    local_shape = states.sharding_of(variable).local_shape
    return zero.is_divided(variable) or gradient.shape == local_shape


def _sums(strategy, *values):
    return strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
    )
