"""Clips gradients as Keras does, by norms of whole variables.

Keras takes the norm of the gradients that an optimizer is given. Here these are
shards, whose squares have to be summed first.
"""

import tensorflow as tf

from tfscale.collectives import rank_collectives
from tfscale.collectives import replica_collectives
from tfscale.variables.of_variable import is_overwritten
from tfscale.variables.of_variable import sharding_of


def is_sharded(variable) -> bool:
    """Whether model ranks divide a variable, of Keras or distributed."""
    return sharding_of(variable).model_dim is not None


def clip(optimizer, grads, variables, extended) -> list:
    """Gradients clipped as an optimizer is set to; in replica context.

    Not those that overwrite a variable, which are no gradients.
    """
    given = list(grads)
    are_kept = [is_overwritten(variable) for variable in variables]
    grads = [None if kept else g for kept, g in zip(are_kept, given)]
    clipped = _clip(optimizer, grads, variables, extended)
    return [g if kept else c for kept, g, c in zip(are_kept, given, clipped)]


def _clip(optimizer, grads, variables, extended):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    scale = optimizer.loss_scale_factor
    if inner is not optimizer:
        scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    if scale is None:
        return _clip_unscaled(inner, grads, variables, extended)
    # Mostly a power of two: to divide and multiply by it changes no digit.
    grads = _each(lambda g: g / tf.cast(scale, g.dtype), grads)
    grads = _clip_unscaled(inner, grads, variables, extended)
    return _each(lambda g: g * tf.cast(scale, g.dtype), grads)


def _clip_unscaled(optimizer, grads, variables, extended):
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        return _each(lambda g: tf.clip_by_value(g, -limit, limit), grads)
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit:
        return grads
    found = squares(grads, variables, extended)
    if optimizer.global_clipnorm:
        found = [tf.add_n(found)] * len(found)
    factors = iter(limit / tf.maximum(tf.sqrt(s), limit) for s in found)
    return _each(lambda g: g * tf.cast(next(factors), g.dtype), grads)


def squares(tensors, variables, extended) -> list[tf.Tensor]:
    """Squared norms of whole variables' tensors, in float32 or float64.

    In replica context, outside of branches. The tensors have the shape of this
    rank's and replica's shard of each variable; None is left out.
    """
    found, sharded, parted = [], [], []
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    dtype = tf.float64 if tf.float64 in dtypes else tf.float32
    for tensor, variable in zip(tensors, variables):
        if tensor is None:
            continue
        square = tf.reduce_sum(tf.square(tf.cast(tensor, dtype)))
        if is_sharded(variable):
            sharded.append(len(found))
        if extended.optimizer_states.dim_of(variable) is not None:
            parted.append(len(found))
        found.append(square)
    for indices, add_up in (
        (parted, replica_collectives.sum_over_replicas),
        (sharded, rank_collectives.sum_over_ranks),
    ):
        if indices:
            total = add_up(tf.stack([found[i] for i in indices]))
            for i, square in zip(indices, tf.unstack(total)):
                found[i] = square
    return found


def _each(function, grads):
    return [None if g is None else function(g) for g in grads]
