"""Captures the gradients of a microbatch before the optimizer applies them."""

from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.mesh.gradient_reduction import scatter_microbatch
from tfscale.step import batch_shard
from tfscale.variables import gather_again


class GradientCapture:
    """The gradients that `train_step` gives to the optimizer in one microbatch.

    They count by the rows of the microbatch: see `BatchShard`.

    Attributes:
        gradients: For each variable a dense tensor or None.
        variables: The variables given to `apply`, or None.
        weight: The factor that is still to be applied to gradients; 0 for a
            microbatch without rows.
        are_paired: Whether `apply_gradients` was called, and not `apply`.
        results: What metrics returned: a result, the metric, and the index
            of the result among those of the metric.
    """

    def __init__(
        self,
        optimizer: keras.Optimizer,
        shard: batch_shard.BatchShard | None = None,
    ):
        self.gradients: list[tf.Tensor | None] = []
        self.variables: list[Any] | None = None
        self.weight: tf.Tensor | float = 1.0
        self.are_paired = False
        self.results: list[tuple[Any, keras.Metric, int]] = []
        self._shard = shard
        self._optimizer = optimizer
        self._has_captured = False
        self._graph = tf.compat.v1.get_default_graph()

    def take(self, optimizer, grads, variables) -> None:
        """Takes gradients in the place of `optimizer.apply`."""
        if optimizer is not self._optimizer or self._has_captured:
            raise ValueError(
                "With GradientAccumulation `train_step` must apply the "
                "gradients of one loss, once, by the optimizer that was given "
                "to `compile`. Received: "
                + (
                    "a second call of its `apply`."
                    if optimizer is self._optimizer
                    else f"a call of another optimizer, {optimizer.name!r}."
                )
                + " Remove the callback, and add up the gradients of parts of "
                "the batch in `train_step`, as docs/accumulation.md does for "
                "two optimizers."
            )
        if self._graph is not tf.compat.v1.get_default_graph():
            raise ValueError(
                "With GradientAccumulation `train_step` must call the "
                "optimizer itself. Received: a call inside of a "
                "`tf.function`, a branch or a loop. Call it in each step: the "
                "callback makes one update of all microbatches, and `fit` puts "
                "the step into a `tf.function`."
            )
        self._has_captured = True
        extended = tf.distribute.get_strategy().extended
        if getattr(extended, "gathers_weights", False):
            gather_again.gather_again()
        if self._shard is not None:
            share = self._shard.share
            self.weight = tf.sign(share) if self._shard.weighs_loss else share
        self.gradients = [
            None if g is None else tf.convert_to_tensor(g) for g in grads
        ]
        self.variables = None if variables is None else list(variables)
        if getattr(extended, "accumulates_shards", False):
            self.gradients = scatter_microbatch(
                extended,
                self.gradients,
                self.variables or attributes.optimized_variables(optimizer),
                self.weight,
            )
            self.weight = 1.0

    def check(self) -> None:
        """Raises if there are no gradients."""
        if not any(g is not None for g in self.gradients):
            raise ValueError(
                "With GradientAccumulation `train_step` must apply gradients "
                "by the optimizer that was given to `compile`. Received: a "
                f"`train_step` that never applied {self._optimizer.name!r} "
                "to a gradient. Call `self.optimizer.apply` in it, or remove "
                "the callback."
            )
