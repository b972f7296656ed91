"""The variables of a stage while it is traced: tensors stand for them."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.tracing import keys
from tfscale.step import losses
from tfscale.variables.of_variable import sharding_of


class StageVariables(keras.StatelessScope):
    """Arguments of a traced function in the place of a stage's variables.

    For a sharded variable the argument has the shape of a rank's shard. Layers
    with a rule take it as it is, the others see it gathered. `params` are the
    arguments for the trainable variables, in their order.
    """

    losses: list[tf.Tensor]

    def __init__(
        self, stage: Stage, numbers: dict[int, int], argument: Callable
    ):
        def make(kind, variable):
            shape = variable.shape
            if _shard_dim(variable) is not None:
                shape = sharding_of(variable).local_shape
            return argument(kind(numbers[id(variable)]), shape, variable.dtype)

        self._stage = stage
        self._numbers = numbers
        self.params = [make(keys.Param, v) for v in stage.trainable]
        states = [make(keys.State, v) for v in stage.state]
        self._wholes, self._shards = [], {}
        for variable, value in zip(
            [*stage.trainable, *stage.state], [*self.params, *states]
        ):
            dim = _shard_dim(variable)
            if dim is not None:
                self._shards[id(variable)] = value
                value = rank_collectives.gather_from_ranks(value, dim)
            self._wholes.append((variable, value))
        self._given_shards = dict(self._shards)
        self._argument = argument
        self._graph = tf.compat.v1.get_default_graph()
        super().__init__(state_mapping=self._wholes, collect_losses=True)

    @contextlib.contextmanager
    def replaced(self):
        """Within it, layers use the tensors, and assign to them."""
        with self, step_context.within_ranks(given_shards=self._shards):
            yield

    def take_losses(self) -> list[tf.Tensor]:
        """The losses that layers have added since the last call."""
        losses, self.losses = self.losses, []
        return losses

    def new_states(self) -> dict[Any, tf.Tensor]:
        """The values that layers assigned to variables, by key.

        A layer may assign to a trainable variable too
        (`SpectralNormalization` does): its value when the optimizer steps is
        that of the last microbatch.
        """
        made, rows = {}, None
        for variable, before in self._wholes:
            key = keys.NewState(self._numbers[id(variable)])
            value = self.state_mapping[id(variable)]
            shard = self._shards.get(id(variable))
            if shard is not self._given_shards.get(id(variable)):
                made[key] = shard
            elif value is not before:
                if (dim := _shard_dim(variable)) is not None:
                    value = rank_collectives.local_shard(value, dim)
                made[key] = value
                if variable.synchronization == "on_read":
                    # A metric; not of a row that counts nothing.
                    if rows is None:
                        rows = self._argument(keys.ROWS, [], losses.precision())
                    made[key] = tf.where(rows > 0, value, before)
        return made

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        if not variable.trainable:
            return value
        if value is not None:
            return rank_collectives.as_used(value)
        if id(variable) in self._numbers:
            raise ValueError(
                "A layer or loss may use only variables of its own stage. "
                f"Received: the variable {variable.path!r} of another stage, "
                f"used in stage {self._stage.index}, where it would get no "
                "gradient. Make it an attribute of the layer that uses it, "
                "or, if a `compute_loss` calls layers, have the model return "
                "what the loss needs."
            )
        return None

    def add_update(self, update):
        """See `keras.StatelessScope`.

        As on one device the gradient by a trainable variable that was assigned
        to is that by its new value, and what made it has none.
        """
        variable, value = update
        if id(variable) not in self.state_mapping:
            raise ValueError(
                "A layer or loss in a pipeline may assign only to variables "
                f"of layers. Received: an assignment to {variable.path!r} in "
                f"stage {self._stage.index}, which no layer of the stage has "
                "as a variable: it would be lost. Make the variable, metric "
                "or `keras.random.SeedGenerator` an attribute of the layer. "
                "`keras.random` without a seed draws from a shared one: pass "
                "the layer's own generator."
            )
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                "A layer of a pipeline stage must not assign to a variable in "
                "a loop, a branch or a function: a stage is a function of its "
                "variables. Received: an assignment to "
                f"{variable.path!r} in stage {self._stage.index}. Return the "
                "value from the loop and assign it afterwards: call "
                "`metric.update_state` with the values of all iterations, or "
                "draw random numbers before the loop."
            )
        before = self.get_current_value(variable)
        if variable.trainable:
            if _shard_dim(variable) is not None:
                raise ValueError(
                    "A layer in a pipeline stage must not assign to a "
                    "trainable variable that model ranks divide. Received: "
                    f"{variable.path!r}. Leave it out of the layout map."
                )
            value = tf.stop_gradient(tf.cast(value, before.dtype))
            value += before - tf.stop_gradient(before)
        super().add_update((variable, value))


def _shard_dim(variable):
    if rank_collectives.num_ranks() == 1:
        return None
    return sharding_of(variable).model_dim
