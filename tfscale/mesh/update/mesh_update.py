"""The updates of an optimizer of a mesh; see `adapters/optimizer.py`."""

import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import layers
from tfscale.collectives import device_names
from tfscale.collectives import rank_collectives
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.mesh import gradient_reduction
from tfscale.mesh.update import clipping
from tfscale.mesh.update import optimizer_checks
from tfscale.optimizers.lars import has_ratio


class MeshUpdate:
    """The update of an optimizer of a mesh, where it differs from Keras'."""

    def __init__(self, extended: Any):
        self._extended = weakref.ref(extended)
        self.states = extended.optimizer_states

    @property
    def extended(self) -> Any:
        """The `MeshExtended`."""
        return self._extended()

    @property
    def is_sharded(self) -> bool:
        """Whether slots may be, over model ranks or over replicas."""
        return self.extended.num_model_ranks > 1 or self.states.are_sharded

    def host_of(self, variable) -> str:
        """The host of the device of a component, or of its shard."""
        return device_names.host_of(variable.device)

    def apply(
        self,
        optimizer: keras.Optimizer,
        apply: Callable[..., Any],
        grads: Sequence[Any],
        given_variables: Sequence[keras.Variable] | None,
        variables: Sequence[keras.Variable],
        are_sums: bool,
    ) -> Any:
        """Calls `apply` of Keras, or of a user's class, with sums.

        `given_variables` are the user's argument, or None; `variables` are
        those of the gradients. `are_sums` says whether the gradients are sums
        over the replicas.
        """
        if not tf.distribute.has_strategy():
            raise ValueError(
                "`optimizer.apply` must be called by the replicas of the "
                f"strategy in whose scope {optimizer.name!r} was made. "
                "Received: a call outside of `strategy.run` and of the "
                "strategy's scope. Put the step into a function and call "
                "`strategy.run(step, args=(x, y))`."
            )
        if tf.distribute.in_cross_replica_context():
            if self.states.are_sharded:
                raise ValueError(
                    "With a zero_stage `optimizer.apply` must be called by the "
                    "replicas. Received: a call outside of `strategy.run`. Put "
                    "it into the function that `strategy.run` is given."
                )
            return apply(grads, given_variables)
        if step_context.current().update is not None:
            return apply(grads, given_variables)
        self._check_outside_of_branches()
        if not optimizer.built:
            self._build(optimizer, variables)
        grads = self._whole_gradients(optimizer, grads, variables, are_sums)
        # In the branch of finite gradients replicas exchange nothing.
        in_branch = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        update = step_context.Update(is_in_branch=in_branch)
        with step_context.within(update=update):
            graph = tf.compat.v1.get_default_graph()
            before = graph.version
            result = apply(grads, given_variables)
        if not tf.executing_eagerly():
            _split_identities(graph)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        is_of_user = not layers.is_of_keras(inner.__class__)
        if is_of_user and self.extended.has_several_replicas:
            optimizer_checks.check_draws(inner, graph, before)
        if in_branch:
            self.states.all_gather(variables)
        return result

    def _check_outside_of_branches(self):
        step, extended = step_context.current(), self.extended
        is_outside = step.batch_shard is step.batch_shard_in_graph
        if is_outside or not extended.has_several_replicas:
            return
        raise ValueError(
            "A `train_step` must call `optimizer.apply` itself, where all "
            "replicas meet. Received: a call in a branch, a loop or a "
            "`tf.function`. To apply gradients every few batches, use the "
            "optimizer's `gradient_accumulation_steps`; to divide a batch, "
            "`tfscale.callbacks.GradientAccumulation`."
        )

    def _build(self, optimizer, variables):
        def build(strategy=None):
            del strategy
            with tf.init_scope():
                optimizer.build(variables)

        extended = self.extended
        if extended.has_several_replicas or extended.num_model_ranks > 1:
            # Where all meet: a slot that begins with its weight, as those of
            # ScheduleFreeAdamW do, would be assigned on one replica only.
            tf.distribute.get_replica_context().merge_call(build)
        else:
            build()

    def _whole_gradients(self, optimizer, grads, variables, are_sums):
        extended = self.extended
        if self.is_sharded:
            optimizer_checks.check(optimizer, variables, extended)
        if not are_sums:
            grads = gradient_reduction.sum_weighed(extended, grads, variables)
        if self.is_sharded:
            return clipping.clip(optimizer, grads, variables, extended)
        return grads

    def holds_everywhere(self, fact: tf.Tensor) -> tf.Tensor:
        """Whether a condition holds on all ranks and sharded replicas."""
        fails = tf.cast(tf.logical_not(fact), tf.float32)
        if self.states.are_sharded:
            fails = replica_collectives.sum_over_replicas(fails)
        return tf.equal(rank_collectives.sum_over_ranks(fails), 0.0)

    def whole_norms(self, grads, variables) -> list[tuple[Any, ...]]:
        """Variables with norms of their whole weights and gradients."""
        given = [
            (variable, gradient)
            for variable, gradient in zip(variables, grads)
            if has_ratio(variable)
        ]
        if not given:
            return []
        variables, grads = zip(*given)
        with rank_collectives.local_shards():
            weights = [
                tf.convert_to_tensor(self.states.local_shard(variable))
                for variable in variables
            ]
        squares = clipping.squares(
            [*weights, *grads], variables * 2, self.extended
        )
        norms = [tf.sqrt(square) for square in squares]
        count = len(variables)
        return list(zip(variables, norms[:count], norms[count:]))

    def move_averages(self, variables, averages, momentum) -> None:
        """Moves averages of variables, each on its own shard."""
        with rank_collectives.local_shards():
            for variable, average in zip(variables, averages):
                if average is None:
                    continue
                value = tf.convert_to_tensor(self.states.local_shard(variable))
                # Differs from the variable's if slots are on the host.
                with tf.device(average.value.device):
                    of_before = tf.cast(momentum, average.dtype)
                    average.value.assign(
                        of_before * tf.convert_to_tensor(average)
                        + (1 - of_before) * value
                    )

    def gather_updated(self, all_variables, updated) -> None:
        """Gathers the shards that replicas updated; None: of all variables."""
        if not self.states.are_sharded:
            return
        update = step_context.current().update
        if update is not None and update.is_in_branch:
            self.states.write(all_variables)
            return
        self.states.all_gather(all_variables if updated is None else updated)


def _split_identities(graph):
    """Takes tensors out of the `IdentityN` in which others pass with them.

    An update of a weight waits for all reads of it. Grappler drops such an
    edge where a path says the same, and the path may lead through the
    `IdentityN` of a `tf.custom_gradient`, in which the gradients of all its
    variables pass:

        read ─► gradient of another weight ─┐
                                            ├─ IdentityN ─► gradient ─► update
                 gradient of the weight ────┘

    Then it splits the `IdentityN`: neither edge nor path is left, and an update
    may come before a read. `keras.remat` is such a gradient, whose backward
    reads all its weights again. TensorFlow 2.21 does so on one device too.
    """
    for op in graph.get_operations():
        if op.type != "IdentityN":
            continue
        for passed, source in zip(op.outputs, op.inputs):
            for consumer in set(passed.consumers()):
                for index, tensor in enumerate(consumer.inputs):
                    if tensor is passed:
                        attributes.replace_input(consumer, index, source)
