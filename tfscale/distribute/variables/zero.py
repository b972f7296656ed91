"""ZeRO stage 1: each replica has, and updates, a shard of optimizer slots.

With D replicas, each of which has all weights and 1 / D of every slot, a step
of the optimizer is

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

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale import step_context
from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.distribute import reducer
from tfscale.sharding.of_variable import sharding_of
from tfscale.sharding.sharding import Sharding

# Smaller weights, in elements, stay whole in stage 3: to gather one costs more
# than it saves (`stage3_param_persistence_threshold` of DeepSpeed).
MIN_ELEMENTS = 4096


class OptimizerStateSharding:
    """The replicas' shards of each variable and of its slots.

    Args:
        stage: `zero_stage` of the `MeshStrategy`.
        num_replicas: Number of replicas.
        num_ranks: Number of model ranks of each replica.
        are_on_host: Whether slots are on the host of their variable's device.
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

        Two weights, one in use and one on its way, even if they are the two
        largest.
        """
        return sum(self._largest)

    def weight_sharding(
        self, sharding: Sharding, data_dim: int | None
    ) -> Sharding:
        """How a new trainable weight is sharded, over the replicas too.

        Args:
            sharding: Over model ranks.
            data_dim: The dim that a layout map names, or None.
        """
        if data_dim is not None:
            sharding = dataclasses.replace(sharding, data_dim=data_dim)
        elif math.prod(sharding.shape) >= MIN_ELEMENTS:
            sharding = sharding.over_data()
        if sharding.data_dim is not None:
            self._largest = sorted([*self._largest, sharding.shard_bytes])[1:]
        return sharding

    def sharding_of(self, variable) -> Sharding:
        """How the slots of a variable are sharded.

        Args:
            variable: A trainable variable, of Keras or distributed.
        """
        # Keras overwrites a scale of float8 with its gradient; an optimizer
        # does not update it.
        if not self.are_sharded or getattr(
            variable, "overwrite_with_gradient", False
        ):
            return sharding_of(variable)
        return sharding_of(variable).over_data()

    def dim_of(self, variable) -> int | None:
        """The dim of a shard that the replicas divide, or None."""
        return self.sharding_of(variable).data_dim

    def local_shard(self, variable):
        """The tensor that this replica updates: a shard, or its component.

        Args:
            variable: A trainable variable, of Keras or distributed.
        """
        thread = symbols.get_current_replica_id_as_int()
        sharding = self.sharding_of(variable)
        if sharding.data_dim is None or is_divided(variable):
            return _distributed(variable).values[thread]
        replica = thread // self._num_ranks
        return LocalShard(variable, thread, sharding, replica)

    @property
    def reads_local_shards(self) -> bool:
        """Whether this thread runs inside `reading_local_shards`."""
        update = step_context.current().update
        return update is not None and update.reads_local_shards

    @contextlib.contextmanager
    def reading_local_shards(self):
        """Within it, a strategy's `update` passes local shards.

        Components are as the step before left them, until `all_gather`.
        """
        update = step_context.current().update
        if update is not None:
            update = dataclasses.replace(update, reads_local_shards=True)
        with step_context.within(update=update):
            yield

    def all_gather(self, variables: Sequence[keras.Variable]) -> None:
        """Gathers the shards of variables that replicas have updated.

        In replica context, and not in a loop or branch.
        """
        variables = [v for v in variables if not is_divided(v)]
        dims = [self.dim_of(variable) for variable in variables]
        found = [v for v, dim in zip(variables, dims) if dim is not None]
        shards = []
        for variable in found:
            shard = self.local_shard(variable)
            with tf.device(shard.device):
                shards.append(shard.take())
        wholes = gather(shards, [dim for dim in dims if dim is not None])
        thread = symbols.get_current_replica_id_as_int()
        for variable, whole in zip(found, wholes):
            component = _distributed(variable).values[thread]
            with tf.device(component.device):
                component.assign(whole, read_value=False)

    def write(self, variables: Sequence[keras.Variable]) -> None:
        """Writes this replica's new shards of variables into its components.

        For branches, in which replicas exchange nothing and which return no
        tensor. It costs a copy of each weight.
        """
        for variable in variables:
            if self.dim_of(variable) is not None and not is_divided(variable):
                self.local_shard(variable).write()

    def all_gather_outside(self, variable, shards: Sequence[tf.Tensor]) -> None:
        """See `all_gather`, for one variable, outside of replicas.

        Args:
            variable: The variable.
            shards: The new shard of each component.
        """
        dim = self.dim_of(variable)
        if dim is None:
            return
        for rank in range(self._num_ranks):
            components = _distributed(variable).values[rank :: self._num_ranks]
            wholes = operations.all_gather(shards[rank :: self._num_ranks], dim)
            for component, whole in zip(components, wholes):
                with tf.device(component.device):
                    component.assign(whole, read_value=False)


def is_divided(variable) -> bool:
    """Whether replicas divide a variable itself, and not only its slots."""
    return sharding_of(variable).data_dim is not None


def shard_key(variable, thread: int) -> tuple[int, int]:
    """The key of a component's new shard in an `Update`.

    Args:
        variable: Of Keras or distributed.
        thread: The thread of the component's replica and rank.
    """
    return id(_distributed(variable)), thread


class LocalShard:
    """A shard of a variable that an optimizer updates in place of the variable.

    An assigned value is a tensor until all shards are gathered and the whole is
    assigned. A slice assigned in place (`ResourceStridedSliceAssign`) would put
    the component into a mode in which each read copies it.

    Args:
        variable: The variable; optimizers know slots by it.
        thread: The thread of this replica and rank.
        sharding: The sharding of the variable's slots.
        replica: Which replica this is.
    """

    def __init__(self, variable, thread, sharding, replica):
        self._variable = _distributed(variable)
        self._component = component = self._variable.values[thread]
        self._key = shard_key(variable, thread)
        rank, dim = component.shape.rank, sharding.data_dim
        size = sharding.local_shape[dim]
        # All other dims are whole: their end of 0 is ignored.
        self._slice = dict(
            begin=[replica * size if d == dim else 0 for d in range(rank)],
            end=[(replica + 1) * size if d == dim else 0 for d in range(rank)],
            strides=[1] * rank,
            begin_mask=sum(1 << d for d in range(rank) if d != dim),
            end_mask=sum(1 << d for d in range(rank) if d != dim),
        )
        self.shape = tf.TensorShape(sharding.local_shape)
        self.dtype = component.dtype
        self.name = self._variable.name
        self.device = component.device

    @property
    def _new_shards(self):
        update = step_context.current().update
        return {} if update is None else update.new_shards

    def _distributed_container(self):
        return self._variable

    def __tf_tensor__(self, dtype=None, name=None):
        """The current value of the shard."""
        value = self._new_shards.get(self._key)
        if value is None:
            with tf.device(self.device):
                value = tf.raw_ops.StridedSlice(
                    input=self._component.read_value(), **self._slice
                )
                value = tf.ensure_shape(value, self.shape)
        return value if dtype is None else tf.cast(value, dtype, name=name)

    def assign(self, value):
        """Changes the shard; see the class."""
        value = tf.convert_to_tensor(value, self.dtype)
        self._new_shards[self._key] = value

    def take(self):
        """The current value, which is no longer noted."""
        value = tf.convert_to_tensor(self)
        self._new_shards.pop(self._key, None)
        return value

    def write(self):
        """Writes the shard into the component, if it was assigned."""
        value = self._new_shards.pop(self._key, None)
        if value is not None:
            with tf.device(self.device):
                whole = tf.raw_ops.TensorStridedSliceUpdate(
                    input=self._component.read_value(),
                    value=value,
                    **self._slice,
                )
                self._component.assign(whole, read_value=False)

    def assign_add(self, value):
        """See `assign`."""
        self.assign(tf.convert_to_tensor(self) + value)

    def assign_sub(self, value):
        """See `assign`."""
        self.assign(tf.convert_to_tensor(self) - value)


def _forward(name):
    def operator(self, *args):
        return getattr(tf.convert_to_tensor(self), name)(*args)

    return operator


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(LocalShard, _name, _forward(_name))


def reduce_scatter(
    tensors: Sequence, dims: Sequence[int | None]
) -> list[tf.Tensor]:
    """This replica's shard of each tensor's sum over replicas.

    With several workers the sums are over the replicas of all, and each
    worker's replicas divide them. Replicas are added in order, as in `Reducer`,
    so results are equal to the last bit to those of an all-reduce.

    Args:
        tensors: One for each variable.
        dims: The dim along which each is sharded; None for a tensor that is
            this worker's shard already.
    """

    def scatter(values, dim):
        if dim is None:
            return values
        return operations.reduce_scatter(values, dim)

    return _exchange(scatter, tensors, dims, over_workers=True)


def reduce_scatter_here(tensors: Sequence, dims: Sequence[int]) -> list:
    """See `reduce_scatter`; of this worker's replicas, copied.

    A slice would keep the buffer of the whole.
    """

    def scatter(values, dim):
        shards = []
        for shard in operations.reduce_scatter(values, dim):
            with tf.device(shard.device):
                shards.append(tf.raw_ops.DeepCopy(x=shard))
        return shards

    return _exchange(scatter, tensors, dims)


def gather(tensors: Sequence, dims: Sequence[int]) -> list[tf.Tensor]:
    """The shards of all replicas of each tensor, gathered on each replica."""
    return _exchange(operations.all_gather, tensors, dims)


def sum_over_replicas(x):
    """The sum of the replicas' tensors, also where gradients are reduced."""
    (total,) = _exchange(
        lambda values, dim: operations.all_reduce(values), [x], [0]
    )
    return total


def _distributed(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def _exchange(collective, tensors, dims, over_workers=False):
    """Calls `collective(values of all replicas, dim)` for each tensor."""
    if not tensors:
        return []

    def merge(strategy, *tensors):
        extended = strategy.extended
        results = [
            operations.in_groups(
                lambda values, dim=dim: collective(values, dim),
                each.values,
                reducer.same_ranks(len(each.values), extended.num_model_ranks),
            )
            for each, dim in zip(tensors, dims)
        ]
        if over_workers:
            totals = extended.sum_over_workers(tf.nest.flatten(results))
            results = tf.nest.pack_sequence_as(results, totals)
        return list(map(symbols.distribute_utils.regroup, results))

    context = tf.distribute.get_replica_context()
    # Of this replica, where all have the same tensor object.
    return context.merge_call(merge, args=tuple(map(tf.identity, tensors)))
