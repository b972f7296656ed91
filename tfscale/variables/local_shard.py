"""A shard that an optimizer updates of a weight whose slots are sharded."""

import tensorflow as tf

from tfscale.context import step_context
from tfscale.variables.of_variable import value_of
from tfscale.variables.operators import TensorOperators
from tfscale.variables.sharding import Sharding


def shard_key(variable, thread: int) -> tuple[int, int]:
    """The key of a component's new shard in an `Update`."""
    return id(value_of(variable)), thread


class LocalShard(TensorOperators):
    """A shard of a variable that an optimizer updates in place of the variable.

    An assigned value is a tensor until all shards are gathered and the whole is
    assigned. A slice assigned in place (`ResourceStridedSliceAssign`) would put
    the component into a mode in which each read copies it.

    Optimizers know slots by the variable, whose slots are sharded by
    `sharding`; `thread` is that of this replica and rank.
    """

    def __init__(self, variable, thread: int, sharding: Sharding, replica: int):
        self._variable = value_of(variable)
        self._component = component = self._variable.values[thread]
        self._key = shard_key(variable, thread)
        begin, shape = sharding.begin_in_shard(replica), sharding.local_shape
        self._slice = dict(
            begin=begin,
            end=[start + size for start, size in zip(begin, shape)],
            strides=[1] * len(shape),
        )
        self.dim = sharding.data_dim
        self.shape = tf.TensorShape(shape)
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
            self.assign_whole(whole)

    def assign_whole(self, value):
        """Changes the whole component."""
        with tf.device(self.device):
            self._component.assign(value, read_value=False)

    def assign_add(self, value):
        """See `assign`."""
        self.assign(tf.convert_to_tensor(self) + value)

    def assign_sub(self, value):
        """See `assign`."""
        self.assign(tf.convert_to_tensor(self) - value)
