"""Makes a Keras optimizer right over replicas and on sharded variables.

Keras clips, unscales and checks gradients before it sums them over replicas,
takes the norm of a shard for that of a variable, and lets each model rank
decide by itself whether its gradients are finite. An optimizer that is made in
the scope of a `MeshStrategy` is of another class, in which it goes like this:

    sum over replicas ─► clip by norms over all ranks ─► Keras' own `apply`,
    with clipping and sums left out, and updates made on shards
"""

import contextlib
import weakref

import keras
import tensorflow as tf

from tfscale import in_place
from tfscale import rank_context
from tfscale.distribute import clipping
from tfscale.distribute import zero
from tfscale.optimizers.lars import LARS
from tfscale.optimizers.lars import has_ratio
from tfscale.tensor_parallel import collectives
from tfscale.whole_batch import part

# A reference to the `MeshExtended` that the variables of each optimizer belong
# to, which keep it. It is no attribute: Keras compares those in copies.
_EXTENDED = weakref.WeakKeyDictionary()

# Their updates need the whole of a variable.
_NOT_ELEMENTWISE = (
    keras.optimizers.Adafactor,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)


def adapt_optimizer(optimizer: keras.Optimizer, extended) -> None:
    """Has an optimizer work on a mesh; its configuration stays the same.

    Args:
        optimizer: The Keras optimizer.
        extended: The `MeshExtended` that its variables belong to.
    """
    _EXTENDED[optimizer] = weakref.ref(extended)
    if (
        extended.num_model_ranks == 1
        and not extended.optimizer_states.are_sharded
    ):
        in_place.put(optimizer, MeshOptimizer)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        in_place.put(optimizer, DividedLossScaleOptimizer)
    elif isinstance(optimizer, LARS):
        in_place.put(optimizer, DividedLARS)
    else:
        in_place.put(optimizer, DividedOptimizer)


class MeshOptimizer(in_place.Mixin):
    """An optimizer of a `MeshStrategy`, put in the place of Keras' class."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`; in replica context."""
        extended = _EXTENDED[self]()
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
            return super().apply(grads, trainable_variables)
        if rank_context.current().applies_gradients:
            return super().apply(grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        grads = self.summed_gradients(grads, variables)
        # Within the branch of a step whose gradients are finite no replica
        # meets another one.
        in_branch = isinstance(self, keras.optimizers.LossScaleOptimizer)
        with (
            rank_context.within(
                applies_gradients=True, applies_in_branch=in_branch
            ),
            extended.reduced_gradients(),
        ):
            result = super().apply(grads, trainable_variables)
        if in_branch:
            extended.optimizer_states.all_gather(variables)
        return result

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # They are sums. `ReplicaContext.all_reduce` would put them through one
        # operation, and so all stages' gradients on one device, where their
        # slots would be read to and written from in each step.
        if _EXTENDED[self]().gradients_are_reduced:
            return list(grads_and_vars)
        return super()._all_reduce_sum_gradients(grads_and_vars)

    def summed_gradients(self, grads, variables):
        """Gradients as `apply` of Keras is to have them."""
        extended = _EXTENDED[self]()
        if extended.gradients_are_reduced:
            return grads
        part.warn_of_undivided()
        return extended.sum_gradients(grads, variables)


class DividedOptimizer(MeshOptimizer):
    """One whose slots are in parts, over model ranks or over replicas.

    What changes variables element by element does so part by part.
    """

    def summed_gradients(self, grads, variables):
        """Gradients that are clipped too, by norms of whole variables."""
        extended = _EXTENDED[self]()
        _check(self, variables, extended)
        grads = super().summed_gradients(grads, variables)
        return clipping.clip(self, grads, variables, extended)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.Optimizer`; averages may be in parts."""
        if not _EXTENDED[self]().optimizer_states.are_sharded:
            super().finalize_variable_values(var_list)
        elif self.use_ema:
            averages = self._model_variables_moving_average
            for variable, average in zip(var_list, averages):
                if average is not None:
                    variable.assign(tf.convert_to_tensor(average))

    def _clip_gradients(self, grads):
        # They are.
        return grads

    def _apply_weight_decay(self, variables):
        with self._on_parts():
            super()._apply_weight_decay(variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        with self._on_parts():
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables
    ):
        with self._on_parts():
            super()._overwrite_model_variables_with_average_value(
                trainable_variables
            )

    def _update_model_variables_moving_average(self, trainable_variables):
        averages = self._model_variables_moving_average
        later = tf.cast(tf.not_equal(self.iterations, 0), tf.float32)
        parts = _EXTENDED[self]().optimizer_states
        with collectives.local_shards():
            for variable, average in zip(trainable_variables, averages):
                if average is None:
                    continue
                momentum = tf.cast(later * self.ema_momentum, average.dtype)
                value = tf.convert_to_tensor(parts.own_shard(variable))
                average.value.assign(
                    momentum * tf.convert_to_tensor(average)
                    + (1 - momentum) * value
                )

    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(grads, trainable_variables)
        parts = _EXTENDED[self]().optimizer_states
        if not parts.are_sharded or rank_context.current().applies_in_branch:
            return
        # Averages may be written to variables that have no gradient.
        parts.all_gather(
            self._trainable_variables if self.use_ema else trainable_variables
        )

    @contextlib.contextmanager
    def _on_parts(self):
        """Within it, variables are what this rank and replica has of them."""
        with (
            collectives.local_shards(),
            _EXTENDED[self]().optimizer_states.updated(),
        ):
            yield


class DividedLossScaleOptimizer(DividedOptimizer):
    """One that scales losses: all ranks find gradients finite, or none."""

    def check_finite(self, grads):
        """See `keras.optimizers.LossScaleOptimizer`."""
        fails = tf.cast(tf.logical_not(super().check_finite(grads)), tf.float32)
        if _EXTENDED[self]().optimizer_states.are_sharded:
            fails = zero.sum_over_replicas(fails)
        return tf.equal(collectives.sum_over_ranks(fails), 0.0)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.LossScaleOptimizer`."""
        self.inner_optimizer.finalize_variable_values(var_list)


class DividedLARS(DividedOptimizer):
    """LARS with norms of whole variables, found before they are updated."""

    def norms(self, weights, gradient, variable):
        """See `LARS`."""
        return rank_context.current().norms[self._get_variable_index(variable)]

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        norms = self._whole_norms(grads, trainable_variables)
        with rank_context.within(norms=norms):
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def _whole_norms(self, grads, variables):
        """Norms of weights and gradients, by the index of the variable."""
        extended = _EXTENDED[self]()
        given = [
            (variable, gradient)
            for variable, gradient in zip(variables, grads)
            if has_ratio(variable)
        ]
        if not given:
            return {}
        variables, grads = zip(*given)
        with self._on_parts():
            weights = [
                tf.convert_to_tensor(
                    extended.optimizer_states.own_shard(variable)
                )
                for variable in variables
            ]
        squares = clipping.squares([*weights, *grads], variables * 2, extended)
        norms = [tf.sqrt(square) for square in squares]
        return {
            self._get_variable_index(variable): pair
            for variable, *pair in zip(
                variables, norms[: len(variables)], norms[len(variables) :]
            )
        }


def _check(optimizer, variables, extended):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    divided = [
        v
        for v in variables
        if clipping.is_sharded(v)
        or extended.optimizer_states.dim_of(v) is not None
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
    if isinstance(inner, LARS) and inner is not optimizer:
        raise ValueError(
            "LARS needs norms of whole variables before a step is known to be "
            "finite. Received: LARS in a LossScaleOptimizer, and variables "
            "that are divided. Use `mixed_bfloat16`, which needs no loss "
            "scaling, or neither a layout map that shards something nor "
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
