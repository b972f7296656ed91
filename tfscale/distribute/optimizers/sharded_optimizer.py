"""Optimizers whose slots are sharded, over model ranks or over replicas."""

import contextlib

import tensorflow as tf

from tfscale import rank_context
from tfscale.distribute.optimizers import clipping
from tfscale.distribute.optimizers import optimizer_checks
from tfscale.distribute.optimizers.mesh_optimizer import MeshOptimizer
from tfscale.distribute.optimizers.mesh_optimizer import extended_of
from tfscale.distribute.variables import zero
from tfscale.optimizers.lars import has_ratio
from tfscale.tensor_parallel import collectives


class ShardedOptimizer(MeshOptimizer):
    """One whose slots are sharded, over model ranks or over replicas.

    What changes variables element by element does so part by part.
    """

    def summed_gradients(self, grads, variables):
        """Gradients that are clipped too, by norms of whole variables."""
        extended = extended_of(self)
        optimizer_checks.check(self, variables, extended)
        grads = super().summed_gradients(grads, variables)
        return clipping.clip(self, grads, variables, extended)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.Optimizer`; averages may be in parts."""
        if not extended_of(self).optimizer_states.are_sharded:
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
        with self._on_shards():
            super()._apply_weight_decay(variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        with self._on_shards():
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables
    ):
        # In a branch, of the steps that overwrite.
        with self._on_shards():
            super()._overwrite_model_variables_with_average_value(
                trainable_variables
            )
        extended_of(self).optimizer_states.write(trainable_variables)

    def _update_model_variables_moving_average(self, trainable_variables):
        averages = self._model_variables_moving_average
        later = tf.cast(tf.not_equal(self.iterations, 0), tf.float32)
        parts = extended_of(self).optimizer_states
        with collectives.local_shards():
            for variable, average in zip(trainable_variables, averages):
                if average is None:
                    continue
                momentum = tf.cast(later * self.ema_momentum, average.dtype)
                value = tf.convert_to_tensor(parts.local_shard(variable))
                average.value.assign(
                    momentum * tf.convert_to_tensor(average)
                    + (1 - momentum) * value
                )
        if self.ema_overwrite_frequency:
            parts.write(trainable_variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(grads, trainable_variables)
        parts = extended_of(self).optimizer_states
        if not parts.are_sharded:
            return
        if rank_context.current().update.applies_in_branch:
            parts.write(self._trainable_variables)
            return
        # Averages may be written to variables that have no gradient.
        parts.all_gather(
            self._trainable_variables if self.use_ema else trainable_variables
        )

    @contextlib.contextmanager
    def _on_shards(self):
        """Within it, variables are what this rank and replica has of them."""
        with (
            collectives.local_shards(),
            extended_of(self).optimizer_states.updated(),
        ):
            yield


class ShardedLossScaleOptimizer(ShardedOptimizer):
    """One that scales losses: all ranks find gradients finite, or none."""

    def check_finite(self, grads):
        """See `keras.optimizers.LossScaleOptimizer`."""
        fails = tf.cast(tf.logical_not(super().check_finite(grads)), tf.float32)
        if extended_of(self).optimizer_states.are_sharded:
            fails = zero.sum_over_replicas(fails)
        return tf.equal(collectives.sum_over_ranks(fails), 0.0)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.LossScaleOptimizer`."""
        self.inner_optimizer.finalize_variable_values(var_list)


class ShardedLARS(ShardedOptimizer):
    """LARS with norms of whole variables, found before they are updated."""

    def norms(self, weights, gradient, variable):
        """See `LARS`."""
        return rank_context.current().update.norms[
            self._get_variable_index(variable)
        ]

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        norms = self._whole_norms(grads, trainable_variables)
        with rank_context.within(norms=norms):
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def _whole_norms(self, grads, variables):
        """Norms of weights and gradients, by the index of the variable."""
        extended = extended_of(self)
        given = [
            (variable, gradient)
            for variable, gradient in zip(variables, grads)
            if has_ratio(variable)
        ]
        if not given:
            return {}
        variables, grads = zip(*given)
        with self._on_shards():
            weights = [
                tf.convert_to_tensor(
                    extended.optimizer_states.local_shard(variable)
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
