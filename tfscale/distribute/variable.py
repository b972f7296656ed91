"""Variables of a mesh: a component on a device of every replica and rank.

    MeshVariable      every component holds the value
    ShardedVariable   every component holds a part of it
    MeshAccumulator   every replica adds up its own (metrics)

They differ from those of `tf.distribute.MirroredStrategy` in this: gradients
of lookups come out dense, model ranks of one replica count once, and where
gradients are summed over the replicas already, each updates its own component.
"""

import contextlib

import numpy as np
import tensorflow as tf

from tfscale import _internals
from tfscale import rank_context
from tfscale.collectives import operations
from tfscale.distribute import zero
from tfscale.sharding.sharding import Sharding
from tfscale.sharding.shards import shard
from tfscale.sharding.shards import shards
from tfscale.sharding.shards import unshard
from tfscale.tensor_parallel import collectives

# Under which a checkpoint of TensorFlow has the value of any variable.
_CHECKPOINT_KEY = "VARIABLE_VALUE"


@contextlib.contextmanager
def on_trial():
    """Within it, in this thread, what is assigned is checked and dropped."""
    with rank_context.within(assigns_on_trial=True):
        yield


class _Assigned:
    """What all kinds have in common: they can be assigned to on trial."""

    _primary: tf.Variable

    def assign(self, value, *args, **kwargs):
        """See `tf.Variable.assign`; within `on_trial` it changes nothing."""
        if rank_context.current().assigns_on_trial:
            self._checked(value)
            return self
        return super().assign(value, *args, **kwargs)

    @property
    def whole_shape(self) -> tf.TensorShape:
        """The shape of the value, of which components may have parts."""
        return self._primary.shape

    def _checked(self, value):
        """A value as a tensor; before any component is changed."""
        value = tf.convert_to_tensor(value, self.dtype)
        if not value.shape.is_compatible_with(self.whole_shape):
            raise ValueError(
                "A value must have the shape of the variable that it is "
                f"assigned to. Received: {value.shape} for {self.name!r} of "
                f"shape {self.whole_shape}. Give the whole value, as of one "
                "device; the variable was not changed."
            )
        return value


class MeshVariable(_Assigned, _internals.MirroredVariable):
    """A variable with equal components on one device of every replica.

    Made by `MeshStrategy` for what is created in its scope, not by users.
    """

    @property
    def sharding(self) -> Sharding:
        """What each device has of it: here all."""
        extended = self.distribute_strategy.extended
        return Sharding(
            tuple(self._primary.shape),
            self.dtype.size,
            extended.num_replicas,
            extended.num_model_ranks,
        )

    @property
    def state_sharding(self) -> Sharding:
        """What each device has of an optimizer's state of it."""
        return self.distribute_strategy.extended.optimizer_states.sharding_of(
            self
        )

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        value = super()._dense_var_to_tensor(dtype, name, as_ref)
        if self.trainable and not tf.distribute.in_cross_replica_context():
            return collectives.as_used(dense_gradient(value))
        return value

    def _update_replica(self, update_fn, value, **kwargs):
        if self.distribute_strategy.extended.gradients_are_reduced:
            # Every replica computes the same value: nothing to aggregate.
            component = self._get_on_device_or_primary()
            with tf.device(component.device):
                return update_fn(component, value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class ShardedVariable(MeshVariable):
    """A variable of which each component has a part.

    A weight is sharded over the model ranks of a replica, a slot of an
    optimizer like its weight and, with `zero_stage=1`, over the replicas too.

    It is the whole value for all who do not ask for shards: outside of
    replicas the parts are put together, inside they are gathered, and what is
    assigned is sharded. Within `collectives.local_shards`, and where a
    strategy updates components, it is the component's own part.

    Made by `MeshStrategy` for what is sharded, not by users.
    """

    def __init__(
        self,
        strategy,
        values,
        aggregation,
        var_policy=None,
        *,
        sharding: Sharding,
    ):
        self._sharding = sharding
        super().__init__(strategy, values, aggregation, var_policy)

    @property
    def sharding(self) -> Sharding:
        """What each device has of it."""
        return self._sharding

    @property
    def shape(self):
        """The whole shape, or the rank's where the shard is what is read."""
        return self._primary.shape if self._is_local() else self.whole_shape

    @property
    def whole_shape(self) -> tf.TensorShape:
        """The shape of the value, of which components have parts."""
        return tf.TensorShape(self._sharding.shape)

    def get_shape(self):
        """See `shape`."""
        return self.shape

    def value(self):
        """The value as a tensor."""
        return tf.convert_to_tensor(self)

    def read_value(self):
        """The value as a tensor."""
        return tf.convert_to_tensor(self)

    def _is_local(self):
        if tf.distribute.in_cross_replica_context():
            return _internals.get_update_replica_id() is not None
        return collectives.reads_shards()

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        if self._is_local():
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        if self._is_in_replica():
            # Threads meet outside of loops and branches only.
            with (
                collectives.graph_of_collectives(),
                collectives.uses_for_parts(False),
            ):
                value = self._gathered()
            if self.trainable:
                value = collectives.as_used(value)
        else:
            value = self._whole()
        return value if dtype is None else tf.cast(value, dtype)

    def _is_in_replica(self):
        """Whether a replica of its strategy calls, not who has no strategy."""
        return (
            tf.distribute.get_strategy() is self.distribute_strategy
            and not tf.distribute.in_cross_replica_context()
        )

    def _gathered(self):
        """The value, gathered by this replica."""
        value = super()._dense_var_to_tensor()
        sharding = self._sharding
        if sharding.data_dim is not None:
            (value,) = zero.gather([value], [sharding.data_dim])
        if sharding.model_dim is not None:
            value = collectives.gather_from_ranks(value, sharding.model_dim)
        return value

    def __array__(self, dtype=None):
        """The value, which NumPy asks for outside of a strategy's scope too."""
        return np.asarray(self.numpy(), dtype)

    def sparse_read(self, indices, name=None):
        """Rows of the value, for `tf.gather`."""
        return tf.gather(tf.convert_to_tensor(self), indices, name=name)

    def gather_nd(self, indices, name=None):
        """Entries of the value, for `tf.gather_nd`."""
        return tf.gather_nd(tf.convert_to_tensor(self), indices, name=name)

    def _get_as_operand(self):
        return tf.convert_to_tensor(self)

    def _get_cross_replica(self):
        return self._dense_var_to_tensor()

    def _serialize_to_tensors(self):
        # What a checkpoint has does not tell on how many ranks it was written.
        return {_CHECKPOINT_KEY: self._whole()}

    def _restore_from_tensors(self, restored_tensors):
        value = restored_tensors[_CHECKPOINT_KEY]
        parts = shards(self._checked(value), self._sharding)
        assigned = []
        for component, part in zip(self._values, parts):
            with tf.device(component.device):
                assigned.append(
                    component.assign(tf.identity(part), read_value=False)
                )
        return assigned

    def _export_to_saved_model_graph(self, *args, **kwargs):
        # TensorFlow would take the first shard for the value.
        raise ValueError(
            "A model with sharded variables cannot be exported. Received: "
            f"{self.name!r}, in {len(self._values)} parts. Save it with "
            "`model.save(path)`, load it with `keras.models.load_model(path)` "
            "outside of the strategy's scope, and export what was loaded."
        )

    def _whole(self):
        return unshard([v.read_value() for v in self._values], self._sharding)

    def _update_cross_replica(self, update_fn, value, **kwargs):
        value = _internals.distribute_utils.regroup(
            tuple(shards(self._checked(value), self._sharding))
        )
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _update_replica(self, update_fn, value, **kwargs):
        if not collectives.reads_shards():
            replica, rank = self.distribute_strategy.extended.place()
            value = shard(self._checked(value), self._sharding, replica, rank)
        return super()._update_replica(update_fn, value, **kwargs)


class MeshAccumulator(_Assigned, _internals.SyncOnReadVariable):
    """A variable of which every replica has its own, added up when read.

    The model ranks of a replica have the same; the first one's counts. Where
    there are several workers, all of them have to read it, at the same time.
    """

    def _get_cross_replica(self):
        strategy = self.distribute_strategy
        ranks = strategy.extended.num_model_ranks
        first_ranks = [v.read_value() for v in self._values[::ranks]]
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return first_ranks[0]
        total = operations.reduce(first_ranks)
        (total,) = strategy.extended.sum_over_workers([total])
        if self.aggregation == tf.VariableAggregation.MEAN:
            total /= tf.cast(strategy.num_replicas_in_sync, total.dtype)
        return total


@tf.custom_gradient
def dense_gradient(x):
    """The same tensor, whose gradient is dense.

    The gradient of a lookup is a `tf.IndexedSlices` in which a row stands as
    often as it was looked up. Keras' optimizers square such slices before they
    add them up, and take norms of them as they are: both wrong. Dense, the
    rows are added up first.
    """
    return tf.identity(x), tf.convert_to_tensor
