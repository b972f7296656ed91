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

from tfscale import thread_values
from tfscale.distribute import zero
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
    if not _divides(extended):
        return
    for name in _UPDATES:
        update = _on_shards(getattr(optimizer, name), extended)
        setattr(optimizer, name, update)
    optimizer._update_model_variables_moving_average = functools.partial(
        _update_moving_average, optimizer, extended
    )
    if extended.slot_parts.are_divided:
        optimizer._backend_apply_gradients = functools.partial(
            _apply_and_gather,
            optimizer,
            extended,
            optimizer._backend_apply_gradients,
        )
        # A LossScaleOptimizer leaves it to its inner optimizer.
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.finalize_variable_values = functools.partial(
                _overwrite_with_averages, optimizer
            )
    # `_apply` has clipped already.
    optimizer._clip_gradients = lambda grads: grads
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        check = optimizer.check_finite
        optimizer.check_finite = lambda grads: _on_all(check(grads), extended)


def _apply(optimizer, extended, apply, grads, trainable_variables=None):
    """See `keras.optimizers.Optimizer.apply`; in replica context."""
    if tf.distribute.in_cross_replica_context():
        if extended.slot_parts.are_divided:
            raise ValueError(
                "With zero_stage=1 `optimizer.apply` must be called by the "
                "replicas. Received: a call outside of `strategy.run`. Put it "
                "into the function that `strategy.run` is given."
            )
        return apply(grads, trainable_variables)
    if _is_applying():
        return apply(grads, trainable_variables)
    variables = trainable_variables or optimizer._trainable_variables
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    if _divides(extended):
        _check(optimizer, variables, extended)
    if not extended.gradients_are_reduced:
        grads = extended.sum_gradients(grads, variables)
    if _divides(extended):
        grads = _clip(optimizer, grads, variables, extended)
    # Within the branch of a step whose gradients are finite no replica meets
    # another one.
    in_branch = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    with (
        thread_values.within(_thread, applying=True, in_branch=in_branch),
        extended.reduced_gradients(),
    ):
        result = apply(grads, trainable_variables)
    if in_branch:
        extended.slot_parts.gather(variables)
    return result


def _is_applying():
    return getattr(_thread, "applying", False)


def _divides(extended):
    """Whether the slots of an optimizer are in parts."""
    return extended.num_model_ranks > 1 or extended.slot_parts.are_divided


def _apply_and_gather(optimizer, extended, apply, grads, variables):
    """Keras' own method; then replicas exchange what they have updated."""
    apply(grads, variables)
    if _thread.in_branch:
        return
    if optimizer.use_ema:
        # Averages may be written to variables that have no gradient.
        variables = optimizer._trainable_variables
    extended.slot_parts.gather(variables)


def _clip(optimizer, grads, variables, extended):
    """Clips as Keras does, by norms of whole variables."""
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
    squares = _squares(grads, variables, extended)
    if optimizer.global_clipnorm:
        squares = [tf.add_n(squares)] * len(squares)
    factors = iter(limit / tf.maximum(tf.sqrt(s), limit) for s in squares)
    return _each(lambda g: g * tf.cast(next(factors), g.dtype), grads)


def _squares(grads, variables, extended):
    """Squared norms of the gradients, each of the whole variable."""
    squares, sharded, parted = [], [], []
    for gradient, variable in zip(grads, variables):
        if gradient is None:
            continue
        square = tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
        if _is_sharded(variable):
            sharded.append(len(squares))
        if extended.slot_parts.dim_of(variable) is not None:
            parted.append(len(squares))
        squares.append(square)
    for places, add_up in (
        (parted, zero.sum_over_replicas),
        (sharded, collectives.sum_over_ranks),
    ):
        if places:
            total = add_up(tf.stack([squares[i] for i in places]))
            for i, square in zip(places, tf.unstack(total)):
                squares[i] = square
    return squares


def _each(function, grads):
    return [None if g is None else function(g) for g in grads]


def _is_sharded(variable):
    if isinstance(variable, keras.Variable):
        variable = variable.value
    return isinstance(variable, ShardedVariable)


def _on_shards(method, extended):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with collectives.local_shards(), extended.slot_parts.updated():
            return method(*args, **kwargs)

    return call


def _on_all(condition, extended):
    """Whether a condition holds on every model rank and replica."""
    fails = tf.cast(tf.logical_not(condition), tf.float32)
    if extended.slot_parts.are_divided:
        fails = zero.sum_over_replicas(fails)
    return tf.equal(collectives.sum_over_ranks(fails), 0.0)


def _update_moving_average(optimizer, extended, trainable_variables):
    """Keras' own update, of parts by parts."""
    averages = optimizer._model_variables_moving_average
    later = tf.cast(tf.not_equal(optimizer.iterations, 0), tf.float32)
    with collectives.local_shards():
        for variable, average in zip(trainable_variables, averages):
            if average is None:
                continue
            momentum = tf.cast(later * optimizer.ema_momentum, average.dtype)
            value = tf.convert_to_tensor(extended.slot_parts.own_part(variable))
            average.value.assign(
                momentum * tf.convert_to_tensor(average)
                + (1 - momentum) * value
            )


def _overwrite_with_averages(optimizer, variables):
    """See `keras.optimizers.Optimizer.finalize_variable_values`."""
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        for variable, average in zip(variables, averages):
            if average is not None:
                variable.assign(tf.convert_to_tensor(average))


def _check(optimizer, variables, extended):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    divided = [
        v
        for v in variables
        if _is_sharded(v) or extended.slot_parts.dim_of(v) is not None
    ]
    if not divided:
        return
    if isinstance(inner, _NOT_ELEMENTWISE):
        raise ValueError(
            "An optimizer whose slots are divided must update each element by "
            f"itself. Received: {type(inner).__name__}, which needs the whole "
            "of a variable at once. Use AdamW, Lion, SGD or another one that "
            "is elementwise, or neither a layout map that shards something nor "
            "zero_stage=1."
        )
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "Slots can be divided, over model ranks or with zero_stage=1, "
            "under one optimizer for all variables. Received: a "
            "MultiOptimizer, each part of which would clip by itself. Use one "
            "of its optimizers for all."
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` does not work where slots are "
            "divided, over model ranks or with zero_stage=1. Received: "
            f"{inner.gradient_accumulation_steps}. Wrap the "
            "model in `tfscale.PipelineModel`, whose `num_microbatches` does "
            "the same."
        )
    constrained = [
        v.path for v in divided if getattr(v, "constraint", None) is not None
    ]
    if inner is not optimizer and constrained:
        raise ValueError(
            "Variables with a constraint whose slots are divided cannot be "
            f"trained with loss scaling. Received: {constrained[0]!r}. Use "
            "`mixed_bfloat16`, or neither divide the variable in the layout "
            "map nor set zero_stage=1."
        )
