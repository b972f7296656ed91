"""A variable whose components each hold a shard."""

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import rank_collectives
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.variables import of_variable
from tfscale.variables import weight_gather
from tfscale.variables.operators import TensorOperators
from tfscale.variables.sharding import Sharding
from tfscale.variables.shards import shard
from tfscale.variables.shards import shards
from tfscale.variables.shards import unshard
from tfscale.variables.variable import MeshVariable

# The key of a variable's value in a checkpoint of TensorFlow.
_CHECKPOINT_KEY = "VARIABLE_VALUE"


class ShardedVariable(TensorOperators, MeshVariable):
    """A variable whose components each hold a shard.

    A weight is sharded over the model ranks of a replica and, with
    `zero_stage=3`, over the replicas; a slot of an optimizer like its weight
    and, with any `zero_stage` but 0, over the replicas too.

    It reads as the whole value: outside of replicas the shards are
    concatenated, inside they are gathered, and an assigned value is sharded.
    Within `rank_collectives.local_shards` a slot is the component's shard, and
    a weight is the shard of the rank, gathered over the replicas. Where a
    strategy updates components, both are the component's shard.
    """

    def __init__(
        self,
        strategy,
        values,
        aggregation,
        var_policy=None,
        *,
        sharding: Sharding,
        path: str,
        is_state: bool,
    ):
        self._sharding = sharding
        self._is_state = is_state
        self.path = path
        super().__init__(strategy, values, aggregation, var_policy)

    @property
    def sharding(self) -> Sharding:
        """The sharding over the devices."""
        return self._sharding

    @property
    def shape(self):
        """The whole shape, or the shape of the shard where that is read."""
        if self._is_local():
            return self.values[0].shape
        if self._is_shard_of_rank():
            return tf.TensorShape(self._sharding.shard_shape)
        return self.whole_shape

    @property
    def whole_shape(self) -> tf.TensorShape:
        """The shape of the whole value; components hold shards."""
        return tf.TensorShape(self._sharding.shape)

    def get_shape(self):
        """See `shape`."""
        return self.shape

    def value(self):
        """The value as a tensor."""
        return tf.convert_to_tensor(self)

    read_value = value

    def _is_local(self):
        if tf.distribute.in_cross_replica_context():
            return of_variable.is_updating()
        if self._is_divided_weight():
            extended = self.distribute_strategy.extended
            return extended.optimizer_states.reads_local_shards
        return rank_collectives.reads_shards()

    def _is_divided_weight(self):
        """Whether the replicas divide it, and layers use it."""
        return self._sharding.data_dim is not None and not self._is_state

    def _is_shard_of_rank(self):
        return (
            self._is_divided_weight()
            and rank_collectives.reads_shards()
            and self._is_in_replica()
        )

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        if self._is_local():
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        if self._is_in_replica():
            # Threads exchange values outside of loops and branches only.
            with (
                rank_collectives.graph_of_collectives(),
                step_context.within_ranks(gradients_are_partial=False),
            ):
                value = self._gathered()
            if self.trainable:
                value = rank_collectives.as_used(value)
        else:
            value = self._whole()
        return value if dtype is None else tf.cast(value, dtype)

    def _gathered(self):
        sharding = self._sharding
        if self._is_divided_weight():
            # The gradient of a gather is dense.
            thread = symbols.get_current_replica_id_as_int()
            value = self.values[thread].value()
            states = self.distribute_strategy.extended.optimizer_states
            value = weight_gather.gathered(
                value, sharding.data_dim, states.max_gathered_bytes
            )
        else:
            value = super()._dense_var_to_tensor()
            if sharding.data_dim is not None:
                (value,) = replica_collectives.gather(
                    [value], [sharding.data_dim]
                )
        if sharding.model_dim is not None and not self._is_shard_of_rank():
            value = rank_collectives.gather_from_ranks(
                value, sharding.model_dim
            )
        return value

    def _array(self):
        return self.numpy()

    def sparse_read(self, indices, name=None):
        """Rows of the value, for `tf.gather`."""
        return tf.gather(tf.convert_to_tensor(self), indices, name=name)

    def gather_nd(self, indices, name=None):
        """Entries of the value, for `tf.gather_nd`."""
        return tf.gather_nd(tf.convert_to_tensor(self), indices, name=name)

    def _get_cross_replica(self):
        return self._dense_var_to_tensor()

    def _serialize_to_tensors(self):
        # A checkpoint does not depend on the number of ranks.
        return {_CHECKPOINT_KEY: self._whole()}

    def _restore_from_tensors(self, restored_tensors):
        value = restored_tensors[_CHECKPOINT_KEY]
        local = shards(self._checked(value), self._sharding)
        assigned = []
        for component, new in zip(self.values, local):
            with tf.device(component.device):
                assigned.append(
                    component.assign(tf.identity(new), read_value=False)
                )
        return assigned

    def _export_to_saved_model_graph(self, *args, **kwargs):
        # TensorFlow would save the first shard as the value.
        raise ValueError(
            "A model with sharded variables cannot be exported. Received: "
            f"{self.path!r}, in {len(self.values)} shards. To serve it on the "
            "devices of its mesh, use `tfscale.export(model, path)`. To serve "
            "it on one device, save it with `model.save(path)`, load it with "
            "`keras.models.load_model(path)` outside of the strategy's scope, "
            "and export the loaded model."
        )

    def _whole(self):
        return unshard([v.read_value() for v in self.values], self._sharding)

    def _update_cross_replica(self, update_fn, value, **kwargs):
        value = symbols.distribute_utils.regroup(
            tuple(shards(self._checked(value), self._sharding))
        )
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _update_replica(self, update_fn, value, **kwargs):
        if not self._is_local():
            replica, rank = self.distribute_strategy.extended.replica_and_rank()
            sharding = self._sharding
            if self._is_shard_of_rank():
                begin = sharding.begin_in_shard(replica)
                value = tf.slice(value, begin, sharding.local_shape)
            else:
                value = shard(self._checked(value), sharding, replica, rank)
        return super()._update_replica(update_fn, value, **kwargs)
