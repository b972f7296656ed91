"""Makes a Keras optimizer right over replicas and on sharded variables.

Keras clips, unscales and checks gradients before it sums them over replicas,
takes the norm of a shard for that of a variable, and lets each model rank
decide by itself whether its gradients are finite. An optimizer that is made in
the scope of a `MeshStrategy` has these steps replaced:

    sum over replicas ─► clip by norms over all ranks ─► Keras' own `apply`,
    with clipping and sums left out, and updates made on shards
"""

import functools
import threading

import keras
import tensorflow as tf

from tfscale.distribute.variable import ShardedVariable
from tfscale.tensor_parallel import collectives

_thread = threading.local()

# What changes variables element by element, and so shard by shard.
_UPDATES = (
    "_apply_weight_decay",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
)


# Their updates need the whole of a variable.
_NOT_ELEMENTWISE = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def adapt_optimizer(optimizer, extended) -> None:
    """Replaces steps of an optimizer, once; its configuration stays the same.

    Args:
        optimizer: The Keras optimizer.
        extended: The `MeshExtended` that its variables belong to.
    """
    if getattr(optimizer, "_adapted_to", None) is extended:
        return
    optimizer._adapted_to = extended
    optimizer.apply = functools.partial(
        _apply, optimizer, extended, optimizer.apply
    )
    if extended.num_model_ranks == 1:
        return
    for name in _UPDATES:
        setattr(optimizer, name, _on_shards(getattr(optimizer, name)))
    optimizer._update_model_variables_moving_average = functools.partial(
        _update_moving_average, optimizer
    )
    # `_apply` has clipped already.
    optimizer._clip_gradients = lambda grads: grads
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        check = optimizer.check_finite
        optimizer.check_finite = lambda grads: _on_all_ranks(check(grads))


def _apply(optimizer, extended, apply, grads, trainable_variables=None):
    """See `keras.optimizers.Optimizer.apply`; in replica context."""
    if tf.distribute.in_cross_replica_context() or getattr(
        _thread, "applying", False
    ):
        return apply(grads, trainable_variables)
    variables = trainable_variables or optimizer._trainable_variables
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    if (
        extended._num_replicas_in_sync > 1
        and not extended.gradients_are_reduced
    ):
        grads = _sum_over_replicas(grads)
    if extended.num_model_ranks > 1:
        _check(optimizer, variables)
        grads = _clip(optimizer, grads, variables)
    _thread.applying = True
    try:
        with extended.reduced_gradients():
            return apply(grads, trainable_variables)
    finally:
        _thread.applying = False


def _sum_over_replicas(grads):
    found = [g for g in grads if g is not None]
    context = tf.distribute.get_replica_context()
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, found))
    return [None if g is None else next(summed) for g in grads]


def _clip(optimizer, grads, variables):
    """Clips as Keras does, by norms of whole variables."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        # A power of two: to divide and multiply by it changes no digit.
        scale = tf.convert_to_tensor(optimizer.dynamic_scale)
        grads = _each(lambda g: g / tf.cast(scale, g.dtype), grads)
        grads = _clip(inner, grads, variables)
        return _each(lambda g: g * tf.cast(scale, g.dtype), grads)
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        return _each(lambda g: tf.clip_by_value(g, -limit, limit), grads)
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit:
        return grads
    squares = _squares(grads, variables)
    if optimizer.global_clipnorm:
        squares = [tf.add_n(squares)] * len(squares)
    factors = iter(limit / tf.maximum(tf.sqrt(s), limit) for s in squares)
    return _each(lambda g: g * tf.cast(next(factors), g.dtype), grads)


def _squares(grads, variables):
    """Squared norms of the gradients, those of shards over all ranks."""
    squares, sharded = [], []
    for gradient, variable in zip(grads, variables):
        if gradient is None:
            continue
        square = tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
        if _is_sharded(variable):
            sharded.append(len(squares))
        squares.append(square)
    if sharded:
        total = collectives.sum_over_ranks(
            tf.stack([squares[i] for i in sharded])
        )
        for i, square in zip(sharded, tf.unstack(total)):
            squares[i] = square
    return squares


def _each(function, grads):
    return [None if g is None else function(g) for g in grads]


def _is_sharded(variable):
    if isinstance(variable, keras.Variable):
        variable = variable.value
    return isinstance(variable, ShardedVariable)


def _on_shards(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with collectives.local_shards():
            return method(*args, **kwargs)

    return call


def _on_all_ranks(condition):
    """Whether a condition holds on every model rank."""
    fails = tf.cast(tf.logical_not(condition), tf.float32)
    return tf.equal(collectives.sum_over_ranks(fails), 0.0)


def _update_moving_average(optimizer, trainable_variables):
    """Keras' own update, of shards by shards."""
    averages = optimizer._model_variables_moving_average
    later = tf.cast(tf.not_equal(optimizer.iterations, 0), tf.float32)
    with collectives.local_shards():
        for variable, average in zip(trainable_variables, averages):
            if average is None:
                continue
            momentum = tf.cast(later * optimizer.ema_momentum, average.dtype)
            average.value.assign(
                momentum * tf.convert_to_tensor(average)
                + (1 - momentum) * tf.convert_to_tensor(variable)
            )


def _check(optimizer, variables):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    sharded = [v for v in variables if _is_sharded(v)]
    if not sharded:
        return
    if isinstance(inner, _NOT_ELEMENTWISE):
        raise ValueError(
            "An optimizer of sharded variables must update each element by "
            f"itself. Received: {type(inner).__name__}, which needs the whole "
            "of a variable at once. Use AdamW, Lion, SGD or another one that "
            "is elementwise, or a layout map that shards nothing."
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` does not work on a mesh with model "
            f"ranks. Received: {inner.gradient_accumulation_steps}. Wrap the "
            "model in `tfscale.PipelineModel`, whose `num_microbatches` does "
            "the same."
        )
    constrained = [
        v.path for v in sharded if getattr(v, "constraint", None) is not None
    ]
    if inner is not optimizer and constrained:
        raise ValueError(
            "Sharded variables with a constraint cannot be trained with loss "
            f"scaling. Received: {constrained[0]!r}. Use `mixed_bfloat16` or "
            "leave the variable out of the layout map."
        )
