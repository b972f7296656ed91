"""An optimizer of a mesh: right over replicas and on sharded variables.

Keras clips, unscales and checks gradients before it sums them over replicas,
takes the norm of a shard for that of a variable, and lets each model rank
decide by itself whether its gradients are finite. Here it goes like this:

    sum over replicas ─► clip by norms over all ranks ─► Keras' own `apply`,
    with clipping and sums left out, and updates made on shards

In a microbatch an optimizer hands its gradients over, on any device.
"""

import contextlib
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfscale import in_place
from tfscale import rank_context
from tfscale.distribute.optimizers import clipping
from tfscale.distribute.optimizers import optimizer_checks
from tfscale.distribute.variables import zero
from tfscale.optimizers.lars import LARS
from tfscale.optimizers.lars import has_ratio
from tfscale.tensor_parallel import collectives
from tfscale.whole_batch import changed_gradients

# A reference to the `MeshExtended` that the variables of each optimizer belong
# to, which keep it. It is no attribute: Keras compares those in copies.
_EXTENDED: weakref.WeakKeyDictionary[keras.Optimizer, Any] = (
    weakref.WeakKeyDictionary()
)


class MeshOptimizer(in_place.Mixin):
    """What is put in front of the class of an optimizer."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`; in replica context."""
        capture = rank_context.current().step.gradient_capture
        if capture is not None:
            return capture.take(self, grads, trainable_variables)
        return self._apply_sums(super().apply, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars):
        """See `keras.optimizers.Optimizer`; a class may have its own."""
        grads, variables = zip(*grads_and_vars)
        capture = rank_context.current().step.gradient_capture
        if capture is not None:
            capture.take(self, grads, variables)
            capture.are_paired = True
            return self.iterations
        apply = super().apply_gradients
        return self._apply_sums(
            lambda grads, variables: apply(zip(grads, variables)),
            grads,
            list(variables),
        )

    def _apply_sums(self, apply, grads, trainable_variables):
        """Calls `apply` of Keras, or of a user's class, with sums."""
        extended = _extended_of(self)
        if extended is None:
            return apply(grads, trainable_variables)
        if not tf.distribute.has_strategy():
            raise ValueError(
                "`optimizer.apply` must be called by the replicas of the "
                f"strategy in whose scope {self.name!r} was made. Received: a "
                "call outside of `strategy.run` and of the strategy's scope. "
                "Put the step into a function and call "
                "`strategy.run(step, args=(x, y))`."
            )
        if tf.distribute.in_cross_replica_context():
            if extended.optimizer_states.are_sharded:
                raise ValueError(
                    "With zero_stage=1 `optimizer.apply` must be called by the "
                    "replicas. Received: a call outside of `strategy.run`. Put "
                    "it into the function that `strategy.run` is given."
                )
            return apply(grads, trainable_variables)
        if rank_context.current().update.applies_gradients:
            return apply(grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        grads = _whole_gradients(self, grads, variables, extended)
        # Within the branch of a step whose gradients are finite no replica
        # meets another one.
        in_branch = isinstance(self, keras.optimizers.LossScaleOptimizer)
        with (
            rank_context.within(
                applies_gradients=True, applies_in_branch=in_branch
            ),
            extended.reduced_gradients(),
            zero.noting_parts(),
        ):
            graph = tf.compat.v1.get_default_graph()
            before = graph.version
            result = apply(grads, trainable_variables)
        if extended.has_several_replicas:
            optimizer_checks.check_draws(self, graph, before)
        if in_branch:
            extended.optimizer_states.all_gather(variables)
        return result

    def scale_loss(self, loss):
        """See `keras.optimizers.Optimizer`; Keras' steps begin with it."""
        capture = rank_context.current().step.gradient_capture
        if capture is not None:
            loss = capture.weigh(loss)
        extended = _extended_of(self)
        if extended is not None:
            # An error, where there are no replicas: the gradients that come
            # next are not for those who wrote the step.
            extended.replica_and_rank()
        return super().scale_loss(loss)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # They are sums. `ReplicaContext.all_reduce` would put them through one
        # operation, and so all stages' gradients on one device, where their
        # slots would be read to and written from in each step.
        if rank_context.current().update.gradients_are_reduced:
            return list(grads_and_vars)
        return super()._all_reduce_sum_gradients(grads_and_vars)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.Optimizer`; averages may be in parts."""
        states = _sharded_states(self)
        if (
            states is None
            or not states.are_sharded
            or isinstance(self, keras.optimizers.LossScaleOptimizer)
        ):
            super().finalize_variable_values(var_list)
        elif self.use_ema:
            averages = self._model_variables_moving_average
            for variable, average in zip(var_list, averages):
                if average is not None:
                    variable.assign(tf.convert_to_tensor(average))

    def _clip_gradients(self, grads):
        # Those of sharded variables are clipped, by norms of the whole.
        if _sharded_states(self) is not None:
            return grads
        return super()._clip_gradients(grads)

    def _apply_weight_decay(self, variables):
        with _on_shards(self):
            super()._apply_weight_decay(variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        with contextlib.ExitStack() as stack:
            if isinstance(self, LARS) and _sharded_states(self) is not None:
                norms = self._whole_norms(grads, trainable_variables)
                stack.enter_context(rank_context.within(norms=norms))
            stack.enter_context(_on_shards(self))
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables
    ):
        # In a branch, of the steps that overwrite.
        with _on_shards(self):
            super()._overwrite_model_variables_with_average_value(
                trainable_variables
            )
        states = _sharded_states(self)
        if states is not None:
            states.write(trainable_variables)

    def _update_model_variables_moving_average(self, trainable_variables):
        states = _sharded_states(self)
        if states is None:
            super()._update_model_variables_moving_average(trainable_variables)
            return
        averages = self._model_variables_moving_average
        later = tf.cast(tf.not_equal(self.iterations, 0), tf.float32)
        with collectives.local_shards():
            for variable, average in zip(trainable_variables, averages):
                if average is None:
                    continue
                momentum = tf.cast(later * self.ema_momentum, average.dtype)
                value = tf.convert_to_tensor(states.local_shard(variable))
                average.value.assign(
                    momentum * tf.convert_to_tensor(average)
                    + (1 - momentum) * value
                )
        if self.ema_overwrite_frequency:
            states.write(trainable_variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(grads, trainable_variables)
        states = _sharded_states(self)
        if states is None or not states.are_sharded:
            return
        if rank_context.current().update.applies_in_branch:
            states.write(self._trainable_variables)
            return
        # Averages may be written to variables that have no gradient.
        states.all_gather(
            self._trainable_variables if self.use_ema else trainable_variables
        )

    def _whole_norms(self, grads, variables):
        """Norms of weights and gradients, by the index of the variable."""
        given = [
            (variable, gradient)
            for variable, gradient in zip(variables, grads)
            if has_ratio(variable)
        ]
        if not given:
            return {}
        variables, grads = zip(*given)
        extended = _extended_of(self)
        with _on_shards(self):
            weights = [
                tf.convert_to_tensor(
                    extended.optimizer_states.local_shard(variable)
                )
                for variable in variables
            ]
        squares = clipping.squares([*weights, *grads], variables * 2, extended)
        norms = [tf.sqrt(square) for square in squares]
        count = len(variables)
        return {
            self._get_variable_index(variable): pair
            for variable, *pair in zip(variables, norms[:count], norms[count:])
        }


class MeshLossScaleOptimizer(MeshOptimizer):
    """One that scales losses: all ranks find gradients finite, or none."""

    def check_finite(self, grads):
        """See `keras.optimizers.LossScaleOptimizer`."""
        is_finite = super().check_finite(grads)
        states = _sharded_states(self)
        if states is None:
            return is_finite
        fails = tf.cast(tf.logical_not(is_finite), tf.float32)
        if states.are_sharded:
            fails = zero.sum_over_replicas(fails)
        return tf.equal(collectives.sum_over_ranks(fails), 0.0)


def adapt_optimizer(optimizer: keras.Optimizer, extended: Any) -> None:
    """Has an optimizer work on a mesh; its configuration stays the same.

    Args:
        optimizer: The Keras optimizer.
        extended: The `MeshExtended` that its variables belong to.
    """
    _EXTENDED[optimizer] = weakref.ref(extended)
    in_place.put(optimizer, _class_for(optimizer))


@contextlib.contextmanager
def adapted_optimizer(optimizer: keras.Optimizer):
    """Within it, an optimizer is adapted; behind it, as it was before."""
    with in_place.putting(optimizer, _class_for(optimizer)):
        yield


def _class_for(optimizer):
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return MeshLossScaleOptimizer
    return MeshOptimizer


def _extended_of(optimizer):
    """The `MeshExtended` that an optimizer's variables belong to, or None."""
    reference = _EXTENDED.get(optimizer)
    return None if reference is None else reference()


def _sharded_states(optimizer):
    """The `OptimizerStateSharding` where ranks or replicas divide slots."""
    extended = _extended_of(optimizer)
    if extended is None:
        return None
    states = extended.optimizer_states
    is_sharded = extended.num_model_ranks > 1 or states.are_sharded
    return states if is_sharded else None


@contextlib.contextmanager
def _on_shards(optimizer):
    """Within it, variables are what this rank and replica has of them."""
    states = _sharded_states(optimizer)
    if states is None:
        yield
        return
    with collectives.local_shards(), states.updated():
        yield


def _whole_gradients(optimizer, grads, variables, extended):
    """Gradients as `apply` of Keras is to have them: summed, and clipped."""
    is_sharded = _sharded_states(optimizer) is not None
    if is_sharded:
        optimizer_checks.check(optimizer, variables, extended)
    if not extended.gradients_are_reduced:
        origins, unsummed = changed_gradients.origins_of(
            grads, variables, extended.has_several_replicas
        )
        sums = extended.sum_gradients(unsummed, variables)
        grads = [
            extended.shard_gradient(gradient, variable) if o.is_sum else total
            for o, gradient, variable, total in zip(
                origins, grads, variables, sums
            )
        ]
    if is_sharded:
        return clipping.clip(optimizer, grads, variables, extended)
    return grads
