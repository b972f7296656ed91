"""Variables of a mesh: a component on a device of every replica and rank.

    MeshVariable      every component holds the value
    ShardedVariable   every component holds a part of it (sharded_variable.py)
    MeshAccumulator   every replica adds up its own (metrics)

They differ from those of `tf.distribute.MirroredStrategy`: gradients of lookups
are dense, model ranks of one replica count once, and with gradients that are
summed already, each replica updates its own component.
"""

import functools

import numpy as np
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.variables import of_variable
from tfscale.variables.sharding import Sharding


class _Common:
    values: tuple[tf.Variable, ...]

    def __float__(self):
        return float(self.numpy())

    def __int__(self):
        return int(self.numpy())

    def __array__(self, dtype=None, copy=None):
        """The value, for NumPy, also outside of a strategy's scope.

        Of a scalar, `numpy()` is a number and no array.
        """
        del copy  # It always is one.
        return np.array(self._array(), dtype)

    def _array(self):
        return self.numpy()

    def assign(self, value, *args, **kwargs):
        """See `tf.Variable.assign`; on trial it changes nothing."""
        step = step_context.current()
        if step.update is not None and step.update.is_on_trial:
            self._checked(value)
            return self
        return super().assign(value, *args, **kwargs)

    @property
    def whole_shape(self) -> tf.TensorShape:
        """The shape of the whole value; components may hold shards."""
        return self.values[0].shape

    def _is_in_replica(self):
        return (
            tf.distribute.get_strategy() is self.distribute_strategy
            and not tf.distribute.in_cross_replica_context()
        )

    def _checked(self, value):
        """A value as a tensor; before any component is changed."""
        value = tf.convert_to_tensor(value, self.dtype)
        if not value.shape.is_compatible_with(self.whole_shape):
            raise ValueError(
                "A value must have the shape of its variable. Received: "
                f"{value.shape} for {self.name!r} of shape {self.whole_shape}. "
                "Pass the whole value, as on one device; the variable was not "
                "changed."
            )
        return value


class MeshVariable(_Common, symbols.MirroredVariable):
    """A variable with equal components on one device of every replica."""

    @property
    def sharding(self) -> Sharding:
        """The sharding over the devices: none here."""
        extended = self.distribute_strategy.extended
        return Sharding(
            tuple(self.values[0].shape),
            self.dtype.size,
            extended.num_replicas,
            extended.num_model_ranks,
        )

    @property
    def state_sharding(self) -> Sharding:
        """The sharding of an optimizer's slots of it."""
        return self.distribute_strategy.extended.optimizer_states.sharding_of(
            self
        )

    @property
    def are_states_on_host(self) -> bool:
        """Whether an optimizer's slots of it are on the host."""
        states = self.distribute_strategy.extended.optimizer_states
        return states.are_on_host

    def _array(self):
        # In the scope of another strategy too, where `numpy` is refused.
        return self.values[0].numpy()

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        value = super()._dense_var_to_tensor(dtype, name, as_ref)
        if self.trainable and not tf.distribute.in_cross_replica_context():
            return rank_collectives.as_used(_with_dense_gradient(value))
        return value

    def _update_replica(self, update_fn, value, **kwargs):
        if self.distribute_strategy.extended.gradients_are_summed:
            # Every replica computes the same value: nothing to aggregate.
            component = self.values[symbols.get_current_replica_id_as_int()]
            with tf.device(component.device):
                return update_fn(component, value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class MeshAccumulator(_Common, symbols.SyncOnReadVariable):
    """A variable with a value in each replica, added up when read.

    The model ranks of a replica have equal values; the first one's counts. All
    workers have to read it, at the same time.
    """

    def assign(self, value, *args, read_value=True, **kwargs):
        """See `tf.Variable.assign`; the first replica gets a whole sum.

        TensorFlow gives an equal share to each, and cuts off its fraction if
        it is an integer.
        """
        if (
            self.aggregation != tf.VariableAggregation.SUM
            or self._is_in_replica()
            or of_variable.is_updating()
        ):
            return super().assign(value, *args, read_value=read_value, **kwargs)
        extended = self.distribute_strategy.extended
        count = extended.num_model_ranks
        if extended.workers is not None and extended.workers.index:
            count = 0
        value = self._checked(value)
        assigned = []
        for index, component in enumerate(self.values):
            share = value if index < count else tf.zeros_like(value)
            with tf.device(component.device):
                assigned.append(component.assign(share, read_value=False))
        if not read_value:
            return tf.group(assigned)
        with tf.control_dependencies(assigned):
            return self.read_value()

    def _get_cross_replica(self):
        strategy = self.distribute_strategy
        ranks = strategy.extended.num_model_ranks
        first_ranks = [v.read_value() for v in self.values[::ranks]]
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return first_ranks[0]
        total = operations.reduce(first_ranks)
        if strategy.extended.workers is not None:
            (total,) = strategy.extended.workers.all_reduce([total])
        if self.aggregation == tf.VariableAggregation.MEAN:
            total /= tf.cast(strategy.num_replicas_in_sync, total.dtype)
        return total


def _with_dense_gradient(x):
    """The same tensor, whose gradient is dense.

    The gradient of a lookup is a `tf.IndexedSlices` with a row for each lookup.
    Keras' optimizers square such slices before they sum them, and use their
    norms: both wrong. A dense gradient has them summed.

    Not by `tf.custom_gradient`, which would create up to five operations more,
    and register a gradient that keeps the graph, for each read of a weight.
    """
    name = _registered(x.shape, x.dtype)
    graph = tf.compat.v1.get_default_graph()
    with (
        symbols.record.stop_recording(),
        graph.gradient_override_map({"Identity": name}),
    ):
        same = tf.identity(x)
    # A tape asks for no override; a function that is called does.
    symbols.record.record_operation(
        name, [same], [x], lambda dy: [_dense(None, dy)]
    )
    return same


@functools.cache
def _registered(shape, dtype):
    """The name of the gradient; a saved one is for one shape and dtype."""
    name = f"tfscale_dense_gradient_{dtype.name}_{shape}"
    tf.RegisterGradient(name)(_dense)
    return name


def _dense(op, dy):
    del op
    # It may be the last operation of a tape, and is named like TensorFlow's:
    # see variables/weight_gather.py.
    with tf.name_scope("gradient_tape/"):
        return tf.identity(tf.convert_to_tensor(dy))
