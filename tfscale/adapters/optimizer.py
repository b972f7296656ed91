"""An optimizer of a mesh, whose gradients a microbatch captures.

Keras clips, unscales and checks gradients before it sums them over replicas,
uses the norm of a shard as that of a variable, and lets each model rank decide
alone whether its gradients are finite. Here the order is:

    sum over replicas ─► clip by norms over all ranks ─► Keras' own `apply`,
    with clipping and sums left out, and updates made on shards
"""

import contextlib
import dataclasses
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import in_place
from tfscale._internals import instances
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.optimizers.lars import LARS

# The `MeshUpdate` of each optimizer of a mesh. It is no attribute: Keras
# compares those in copies.
_UPDATES: weakref.WeakKeyDictionary[keras.Optimizer, Any] = (
    weakref.WeakKeyDictionary()
)


class MeshOptimizer(in_place.Mixin):
    """Members that are put before the class of an optimizer."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`; in replica context."""
        capture = step_context.current().gradient_capture
        if capture is not None:
            return capture.take(self, grads, trainable_variables)
        return self._apply(super().apply, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars):
        """See `keras.optimizers.Optimizer`; a class may have its own."""
        grads, variables = zip(*grads_and_vars)
        capture = step_context.current().gradient_capture
        if capture is not None:
            capture.take(self, grads, variables)
            capture.are_paired = True
            return self.iterations
        apply = super().apply_gradients
        return self._apply(
            lambda grads, variables: apply(zip(grads, variables)),
            grads,
            list(variables),
        )

    def apply_sums(self, grads, trainable_variables):
        """As `apply`, of gradients that are summed over the replicas.

        `gradients` are this replica's and rank's shards.
        """
        return self._apply(
            super().apply, grads, trainable_variables, are_sums=True
        )

    def _apply(self, apply, grads, trainable_variables, are_sums=False):
        update = _UPDATES.get(self)
        if update is None:
            shard = step_context.current().batch_shard
            if shard is not None and not are_sums:
                # Of an optimizer made outside of the scope.
                grads = [shard.weigh(gradient) for gradient in grads]
            return apply(grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        return update.apply(
            self, apply, grads, trainable_variables, variables, are_sums
        )

    def scale_loss(self, loss):
        """See `keras.optimizers.Optimizer`; Keras' steps begin with it."""
        shard, update = step_context.current().batch_shard, _UPDATES.get(self)
        if shard is not None:
            loss = shard.weigh_loss(loss)
        elif update is not None:
            # An error outside of replicas.
            update.extended.replica_and_rank()
        return super().scale_loss(loss)

    def _clip_gradients(self, grads):
        # Gradients of sharded variables are clipped by whole norms.
        return grads if _on_shards(self) else super()._clip_gradients(grads)

    def _apply_weight_decay(self, variables):
        with _reading_shards(self):
            super()._apply_weight_decay(variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        update, step = super()._backend_update_step, step_context.current()
        shared = step.shared.updates
        try:
            with _reading_shards(self):
                if step.update is None or shared is None:
                    update(grads, trainable_variables, learning_rate)
                    return
                shared.run(
                    lambda grads, rate: update(
                        grads, trainable_variables, rate
                    ),
                    (grads, tf.convert_to_tensor(learning_rate)),
                    [*self.variables, *trainable_variables],
                )
        except ValueError as error:
            if "in `variable.assign(value)` must match" not in str(error):
                raise
            raise ValueError(
                "An optimizer must assign to sharded slots through its own "
                f"methods. Received: {type(self).__name__}, whose "
                "`update_step` calls `assign` of a slot with a value of the "
                "whole shape. Call `self.assign(slot, value)`, "
                "`self.assign_add` or `self.assign_sub`."
            ) from error

    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(grads, trainable_variables)
        update = _on_shards(self)
        if update:
            # Averages may be written to variables that have no gradient.
            update.gather_updated(
                self._trainable_variables,
                None if self.use_ema else trainable_variables,
            )

    # --- moving averages ----------------------------------------------------

    def _update_model_variables_moving_average(self, trainable_variables):
        update = _UPDATES.get(self)
        if update is None:
            super()._update_model_variables_moving_average(trainable_variables)
            return
        later = tf.cast(tf.not_equal(self.iterations, 0), tf.float64)
        update.move_averages(
            trainable_variables,
            self._model_variables_moving_average,
            later * self.ema_momentum,
        )
        if self.ema_overwrite_frequency:
            update.states.write(trainable_variables)

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables
    ):
        # In a branch, of the steps that overwrite.
        with _reading_shards(self):
            super()._overwrite_model_variables_with_average_value(
                trainable_variables
            )
        update = _on_shards(self)
        if update:
            update.states.write(trainable_variables)

    def finalize_variable_values(self, var_list):
        """See `keras.optimizers.Optimizer`; averages may be in parts."""
        update = _on_shards(self)
        if (
            not update
            or not update.states.are_sharded
            or isinstance(self, keras.optimizers.LossScaleOptimizer)
        ):
            super().finalize_variable_values(var_list)
        elif self.use_ema:
            averages = self._model_variables_moving_average
            for variable, average in zip(var_list, averages):
                if average is not None:
                    variable.assign(tf.convert_to_tensor(average))


class MeshLossScaleOptimizer(MeshOptimizer):
    """A loss-scaling optimizer: all ranks find gradients finite, or none."""

    def check_finite(self, grads):
        """See `keras.optimizers.LossScaleOptimizer`."""
        is_finite = super().check_finite(grads)
        update = _on_shards(self)
        return update.holds_everywhere(is_finite) if update else is_finite


class MeshLARS(MeshOptimizer):
    """LARS, by norms of whole variables and gradients."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        step, shards = step_context.current().update, _on_shards(self)
        if shards:
            found = shards.whole_norms(grads, trainable_variables)
            norms = {self._get_variable_index(v): pair for v, *pair in found}
            step = dataclasses.replace(step, norms=norms)
        with step_context.within(update=step):
            super()._backend_update_step(
                grads, trainable_variables, learning_rate
            )

    def norms(self, weights, gradient, variable):
        """See `LARS`; the whole norms, if this is a shard."""
        update = step_context.current().update
        index = self._get_variable_index(variable)
        if update is None or index not in update.norms:
            return super().norms(weights, gradient, variable)
        return update.norms[index]


class HostOptimizer(in_place.Mixin):
    """An optimizer whose slots and updates are on the host.

    device      gradient ─┐             ┌─► weight
                          ▼             │
    host                  slots ─► what is subtracted

    8 bytes of each float32 weight cross in a step. Were its two slots read and
    written by the device, it would be 16, and the device would need room.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training
    (2021), section 3.
    """

    def update_step(self, gradient, variable, learning_rate):
        """See `keras.optimizers.Optimizer`."""
        with tf.device(_UPDATES[self].host_of(variable)):
            super().update_step(gradient, variable, learning_rate)

    def assign(self, variable, value):
        """See `keras.optimizers.Optimizer`."""
        with _device_of(variable):
            super().assign(variable, value)

    def assign_add(self, variable, value):
        """See `keras.optimizers.Optimizer`."""
        with _device_of(variable):
            super().assign_add(variable, value)

    def assign_sub(self, variable, value):
        """See `keras.optimizers.Optimizer`."""
        with _device_of(variable):
            super().assign_sub(variable, value)


def adapt_optimizer(
    optimizer: keras.Optimizer, update: Any, has_slots: bool
) -> None:
    """Has an optimizer use a `MeshUpdate`; its configuration stays.

    `has_slots` says whether the optimizer has created slots.
    """
    _UPDATES[optimizer] = update
    adapt_capturing(optimizer)
    if has_slots and update.states.are_on_host:
        in_place.put(optimizer, HostOptimizer)


def apply_sums(optimizer: keras.Optimizer, grads: Any, variables: Any) -> None:
    """See `MeshOptimizer.apply_sums`."""
    if isinstance(optimizer, MeshOptimizer):
        optimizer.apply_sums(grads, variables)
    else:
        # For one created outside of the scope, Keras' error says so.
        optimizer.apply(grads, variables)


def with_iterations(
    optimizer: keras.Optimizer, iterations: keras.Variable
) -> keras.Optimizer:
    """The same optimizer and slots with another counter of updates."""
    found = instances.view(
        optimizer,
        **attributes.with_iterations(iterations),
        variables=property(lambda self: [*optimizer.variables, iterations]),
    )
    _UPDATES[found] = _UPDATES[optimizer]
    return found


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """All optimizers of a model, that of `compile` first."""
    values = [model.optimizer, *instances.held_by(model)]
    found = {
        id(x): x for x in values if isinstance(x, keras.optimizers.Optimizer)
    }
    return list(found.values())


def adapt_capturing(optimizer: keras.Optimizer) -> None:
    """Has microbatches capture what an optimizer is given, on any device."""
    kind: type = MeshOptimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        kind = MeshLossScaleOptimizer
    elif isinstance(optimizer, LARS):
        kind = MeshLARS
    in_place.put(optimizer, kind)


def _device_of(variable):
    if isinstance(variable, keras.Variable):
        variable = variable.value
    return tf.device(variable.device)


def _on_shards(optimizer):
    """The `MeshUpdate` of an optimizer whose slots are sharded, or None."""
    update = _UPDATES.get(optimizer)
    return update if update is not None and update.is_sharded else None


def _reading_shards(optimizer):
    """Within it, variables are this rank's and replica's shards."""
    if _on_shards(optimizer) is None:
        return contextlib.nullcontext()
    return rank_collectives.local_shards()
