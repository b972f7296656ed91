"""Sums gradients over replicas, and scatters those whose slots are sharded."""

import functools
from typing import Any

import tensorflow as tf

from tfscale.collectives import rank_collectives
from tfscale.collectives import reducer
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.mesh.replica_checks import check_in_scope
from tfscale.step import batch_norm
from tfscale.variables import gather_again
from tfscale.variables import zero
from tfscale.variables.of_variable import is_overwritten
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.shards import shard


def sum_weighed(extended: Any, gradients, variables) -> list:
    """Sums over the replicas, in which gradients count by the rows of each.

    A tape gives the shard of a model rank and, where replicas divide a weight,
    of their sum. Others are whole, and the same on all replicas:
    `sum_gradients` has returned them, or they are made of these. Such a sum is
    unchanged by one that counts by rows.
    """
    shard = step_context.current().batch_shard
    found = list(gradients)
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        is_whole = _is_whole(gradient, variable)
        if gradient is None or is_overwritten(variable):
            continue
        if zero.is_divided(variable) and not is_whole:
            continue
        if is_whole and (dim := sharding_of(variable).model_dim) is not None:
            gradient = rank_collectives.local_shard(
                tf.convert_to_tensor(gradient), dim
            )
        if shard is not None:
            gradient = shard.weigh(gradient)
        found[i] = gradient
    return sum_over_replicas(extended, found, variables)


def sum_over_replicas(extended: Any, gradients, variables) -> list:
    """Gradients summed over the replicas; in replica context.

    For a variable with sharded slots it is this replica's shard. Of what
    overwrites a variable it is the maximum, as in Keras' own accumulation: the
    scales and largest values of float8.
    """
    for variable in variables:
        check_in_scope(variable)
    states, sums = extended.optimizer_states, list(gradients)
    if not extended.has_several_replicas:
        return sums
    if states.are_weights_sharded:
        gather_again.gather_again()
    given = [i for i, value in enumerate(gradients) if value is not None]
    dims: list = [None] * len(given)
    if states.are_sharded:
        dims = [_dim(states, gradients[i], variables[i]) for i in given]
    noise = extended.gradient_noise
    terms = [] if noise is None else noise.terms(gradients, variables)
    dims += [None] * len(terms)
    # Statistics of layers follow the gradients, and are not sharded.
    sum_up = functools.partial(replica_collectives.sum_up, dims=dims)
    overwriting = {i for i in given if is_overwritten(variables[i])}
    dense = [
        batch_norm.in_its_row(gradients[i])
        if i in overwriting
        else tf.convert_to_tensor(gradients[i])
        for i in given
    ]
    found = batch_norm.all_sums_and_statistics(sum_up, [*dense, *terms])
    for i, total in zip(given, found):
        sums[i] = tf.reduce_max(total, 0) if i in overwriting else total
    if terms:
        noise.of_replicas(found[len(given) :], sums, variables, extended)
    return sums


def scatter_microbatch(extended: Any, gradients, variables, weight) -> list:
    """Gradients of a microbatch times `weight`, reduce-scattered over replicas.

    With `zero_stage=3` the tape has done so for sharded weights.
    """
    states = extended.optimizer_states
    found, dims = list(gradients), {}
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        if (
            gradient is None
            or zero.is_divided(variable)
            or is_overwritten(variable)
        ):
            continue
        factor = tf.cast(weight, gradient.dtype)
        found[i] = tf.math.multiply_no_nan(gradient, factor)
        dim = states.dim_of(variable)
        if dim is not None:
            dims[i] = dim
    shards = replica_collectives.reduce_scatter_here(
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


def _is_whole(gradient, variable):
    """Whether a gradient has the shape of a variable that is divided."""
    sharding = sharding_of(variable)
    return (
        gradient is not None
        and gradient.shape != sharding.local_shape
        and gradient.shape == sharding.shape
    )


def _dim(states, gradient, variable):
    """The dim along which the sum is sharded; see `Reducer.on_each`."""
    if zero.is_divided(variable) and not _is_whole(gradient, variable):
        return reducer.SCATTERED
    sharding = states.sharding_of(variable)
    is_shard = gradient.shape == sharding.local_shape
    if sharding.data_dim is not None and is_shard:
        return reducer.SCATTERED
    return sharding.data_dim
