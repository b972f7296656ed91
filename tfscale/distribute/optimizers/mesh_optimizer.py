"""Makes a Keras optimizer right over replicas and on sharded variables.

Keras clips, unscales and checks gradients before it sums them over replicas,
takes the norm of a shard for that of a variable, and lets each model rank
decide by itself whether its gradients are finite. An optimizer that is made in
the scope of a `MeshStrategy` is of another class, in which it goes like this:

    sum over replicas ─► clip by norms over all ranks ─► Keras' own `apply`,
    with clipping and sums left out, and updates made on shards
"""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale import in_place
from tfscale import rank_context
from tfscale.distribute.optimizers import clipping
from tfscale.distribute.optimizers import optimizer_checks
from tfscale.distribute.variables import zero
from tfscale.whole_batch import changed_gradients
from tfscale.whole_batch import part

# A reference to the `MeshExtended` that the variables of each optimizer belong
# to, which keep it. It is no attribute: Keras compares those in copies.
_EXTENDED: weakref.WeakKeyDictionary[keras.Optimizer, Any] = (
    weakref.WeakKeyDictionary()
)


def set_extended(optimizer: keras.Optimizer, extended: Any) -> None:
    """Notes which `MeshExtended` the variables of an optimizer belong to."""
    _EXTENDED[optimizer] = weakref.ref(extended)


def extended_of(optimizer: keras.Optimizer) -> Any:
    """The `MeshExtended` that the variables of an optimizer belong to."""
    return _EXTENDED[optimizer]()


class MeshOptimizer(in_place.Mixin):
    """An optimizer of a `MeshStrategy`, put in the place of Keras' class."""

    def apply(self, grads, trainable_variables=None):
        """See `keras.optimizers.Optimizer`; in replica context."""
        return self._apply_sums(super().apply, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars):
        """See `keras.optimizers.Optimizer`; a class may have its own."""
        grads, variables = zip(*grads_and_vars)
        apply = super().apply_gradients
        return self._apply_sums(
            lambda grads, variables: apply(zip(grads, variables)),
            grads,
            list(variables),
        )

    def _apply_sums(self, apply, grads, trainable_variables):
        """Calls `apply` of Keras, or of a user's class, with sums."""
        extended = extended_of(self)
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
        grads = self.summed_gradients(grads, variables)
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
        # An error, where there are no replicas: the gradients that come next
        # are not for those who wrote the step.
        extended_of(self).replica_and_rank()
        return super().scale_loss(loss)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # They are sums. `ReplicaContext.all_reduce` would put them through one
        # operation, and so all stages' gradients on one device, where their
        # slots would be read to and written from in each step.
        if extended_of(self).gradients_are_reduced:
            return list(grads_and_vars)
        return super()._all_reduce_sum_gradients(grads_and_vars)

    def summed_gradients(self, grads, variables):
        """Gradients as `apply` of Keras is to have them."""
        extended = extended_of(self)
        if extended.gradients_are_reduced:
            return grads
        origins, unsummed = origins_of(grads, variables, extended)
        sums = extended.sum_gradients(unsummed, variables)
        return [
            extended.shard_gradient(gradient, variable) if o.is_sum else total
            for o, gradient, variable, total in zip(
                origins, grads, variables, sums
            )
        ]


def origins_of(
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    extended: Any,
) -> tuple[list[changed_gradients.Origin], list[Any]]:
    """Which gradients are sums already, and those that are not.

    Warns if the latter were changed by hand.

    Args:
        gradients: Those that a `train_step` gives away.
        variables: The trainable variables that they are of.
        extended: The `MeshExtended` that these belong to.

    Returns:
        For each gradient its origin; and itself, or None if it is a sum.

    Raises:
        ValueError: If some were summed, and added to others that were not.
    """
    origins = [changed_gradients.Origin(gradient) for gradient in gradients]
    unsummed = [None if o.is_sum else g for o, g in zip(origins, gradients)]
    part.warn_of_undivided()
    for origin, variable in zip(origins, variables):
        if origin.is_sum and origin.is_of_tape:
            raise ValueError(
                "All that a gradient is made of must be summed. Received: for "
                f"{variable.path!r} one that is made of what "
                "`tfscale.sum_gradients` has returned and of what it was not "
                "given. Give it all gradients of the tape first."
            )
    changed_gradients.warn_of_changed(
        origins,
        any(clipping.is_sharded(variable) for variable in variables),
        "a replica" if extended.has_several_replicas else "",
        "Sum them before, `tfscale.sum_gradients(gradients, variables)`, or "
        "clip by `clipnorm` or `global_clipnorm` of the optimizer.",
    )
    return origins, unsummed
