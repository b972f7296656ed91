"""ZeRO stage 1: each replica has, and updates, a shard of optimizer slots.

With D replicas that have all weights and 1 / D of every slot each, a step of
the optimizer is

    replica 0                                    replica 1
    gradients ──┐                            ┌── gradients
                ├─► reduce-scatter: sums ◄───┤
    part 0 of the sum                            part 1 of the sum
    updates part 0 of weights and slots          updates part 1
                ├─► all-gather: weights ◄────┤
    all weights                                  all weights

No more is sent than for the all-reduce of gradients that replicas without it
make, which is at best a reduce-scatter and an all-gather too.

A shard is one of D equal slices along a dim, see `Sharding.over_data`. A
variable with no such dim stays whole, slots and all, on each replica.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models (2020), section 5.1 (P_os) and section 7.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.variables.local_shard import LocalShard
from tfscale.variables.of_variable import is_overwritten
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.of_variable import value_of
from tfscale.variables.sharding import Sharding

# Smaller weights, in elements, stay whole in stage 3, slots and all: to gather
# one costs more than it saves (`stage3_param_persistence_threshold` of
# DeepSpeed).
MIN_ELEMENTS = 4096


class OptimizerStateSharding:
    """The replicas' shards of each variable and of its slots.

    `stage` is the `zero_stage` of the `MeshStrategy`; slots may be on the host
    of their variable's device.
    """

    def __init__(
        self,
        stage: int,
        num_replicas: int,
        num_ranks: int,
        are_on_host: bool = False,
    ):
        self.stage = stage
        self.are_on_host = are_on_host
        self.num_replicas = num_replicas if stage else 1
        self._num_ranks = num_ranks
        self._largest = [0, 0]

    @property
    def are_sharded(self) -> bool:
        """Whether slots are sharded over replicas."""
        return self.num_replicas > 1

    @property
    def are_weights_sharded(self) -> bool:
        """Whether weights are sharded over replicas."""
        return self.stage == 3 and self.are_sharded

    @property
    def max_gathered_bytes(self) -> int:
        """The bytes of gathered weights that may be alive on a replica.

        The two largest weights: one in use, one on its way.
        """
        return sum(self._largest)

    def weight_sharding(
        self, sharding: Sharding, data_dim: int | None
    ) -> Sharding:
        """How a new trainable weight is sharded, over the replicas too.

        `sharding` is that over model ranks; `data_dim` the dim that a layout
        map names, or None.
        """
        if data_dim is not None:
            sharding = dataclasses.replace(sharding, data_dim=data_dim)
        elif math.prod(sharding.shape) >= MIN_ELEMENTS:
            sharding = sharding.over_data()
        if sharding.data_dim is not None:
            self._largest = sorted([*self._largest, sharding.shard_bytes])[1:]
        return sharding

    def sharding_of(self, variable) -> Sharding:
        """How the slots of a trainable variable are sharded."""
        sharding = sharding_of(variable)
        is_small = math.prod(sharding.shape) < MIN_ELEMENTS
        is_kept = self.are_weights_sharded and is_small
        # An optimizer does not update what is overwritten.
        if is_kept or is_overwritten(variable):
            return sharding
        return sharding.over_data() if self.are_sharded else sharding

    def dim_of(self, variable) -> int | None:
        """The dim of a shard that the replicas divide, or None."""
        return self.sharding_of(variable).data_dim

    def local_shard(self, variable):
        """The tensor that this replica updates: a shard, or its component."""
        thread = symbols.get_current_replica_id_as_int()
        sharding = self.sharding_of(variable)
        if sharding.data_dim is None or is_divided(variable):
            return value_of(variable).values[thread]
        replica = thread // self._num_ranks
        return LocalShard(variable, thread, sharding, replica)

    @property
    def reads_local_shards(self) -> bool:
        """Whether a strategy's `update` passes local shards in this thread.

        Components are as the step before left them, until `all_gather`.
        """
        step = step_context.current()
        return step.update is not None and step.ranks.reads_shards

    def all_gather(self, variables: Sequence[keras.Variable]) -> None:
        """Gathers the shards of variables that replicas have updated.

        In replica context, and not in a loop or branch.
        """
        shards = self._local_shards(variables)
        wholes = replica_collectives.gather(
            [shard.take() for shard in shards], [shard.dim for shard in shards]
        )
        for shard, whole in zip(shards, wholes):
            shard.assign_whole(whole)

    def write(self, variables: Sequence[keras.Variable]) -> None:
        """Writes this replica's new shards of variables into its components.

        For branches, in which replicas exchange nothing and which return no
        tensor. It costs a copy of each weight.
        """
        for shard in self._local_shards(variables):
            shard.write()

    def _local_shards(self, variables):
        """Of the variables that are whole, and whose slots are not."""
        return [
            self.local_shard(variable)
            for variable in variables
            if self.dim_of(variable) is not None and not is_divided(variable)
        ]

    def all_gather_outside(self, variable, shards: Sequence[tf.Tensor]) -> None:
        """See `all_gather`; outside of replicas, of a shard per component."""
        dim = self.dim_of(variable)
        if dim is None:
            return
        for rank in range(self._num_ranks):
            components = value_of(variable).values[rank :: self._num_ranks]
            wholes = operations.all_gather(shards[rank :: self._num_ranks], dim)
            for component, whole in zip(components, wholes):
                with tf.device(component.device):
                    component.assign(whole, read_value=False)


def is_divided(variable) -> bool:
    """Whether replicas divide a variable itself, and not only its slots."""
    return sharding_of(variable).data_dim is not None
