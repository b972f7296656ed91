"""The variables of a stage while it is traced: tensors stand for them."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.stages import Stage
from tfscale.sharding.of_variable import sharding_of
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel.sharded_layers import rules


class StageVariables:
    """Arguments of a traced function in the place of a stage's variables.

    For a sharded variable the argument has the shape of a rank's shard. Layers
    with a rule take it as it is, the others see it put together.

    Args:
        stage: The stage.
        numbers: The number of each variable, by `id(variable)`.
        argument: Makes the argument of a key, a shape and a dtype.

    Attributes:
        params: The arguments for the trainable variables, in their order.
    """

    def __init__(
        self, stage: Stage, numbers: dict[int, int], argument: Callable
    ):
        def make(kind, variable):
            key = kind(numbers[id(variable)])
            return argument(key, _rank_shape(variable), variable.dtype)

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
                value = collectives.gather_from_ranks(value, dim)
            self._wholes.append((variable, value))
        self._given_shards = dict(self._shards)
        self._scope = _Scope(state_mapping=self._wholes, collect_losses=True)

    @contextlib.contextmanager
    def replaced(self):
        """Within it, layers use the tensors, and assign to them."""
        with self._scope, rules.given_shards(self._shards):
            yield

    @property
    def losses(self) -> list[tf.Tensor]:
        """What layers gave to `add_loss`."""
        return self._scope.losses

    def new_states(self) -> dict[Any, tf.Tensor]:
        """What the layers made of variables, by key.

        Of state variables mostly. A layer may assign to a trainable one too
        (`SpectralNormalization` does): what the last microbatch makes of it is
        its value when the optimizer steps.
        """
        made = {}
        for variable, before in self._wholes:
            key = keys.NewState(self._numbers[id(variable)])
            value = self._scope.state_mapping[id(variable)]
            shard = self._shards.get(id(variable))
            if shard is not self._given_shards.get(id(variable)):
                made[key] = shard
            elif value is not before:
                dim = _shard_dim(variable)
                made[key] = (
                    value if dim is None else collectives.own_part(value, dim)
                )
        return made


class _Scope(keras.StatelessScope):
    """Values in the place of variables, as a rank uses them."""

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        if value is None or not variable.trainable:
            return value
        return collectives.as_used(value)

    def add_update(self, update):
        """See `keras.StatelessScope`.

        As on one device the gradient by a trainable variable that was assigned
        to is that by its new value, and what made it has none.
        """
        variable, value = update
        before = self.get_current_value(variable)
        if variable.trainable and before is not None:
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
    if collectives.num_ranks() == 1:
        return None
    return sharding_of(variable).model_dim


def _rank_shape(variable):
    if _shard_dim(variable) is None:
        return variable.shape
    return sharding_of(variable).local_shape
