"""The variable of a mesh: one component per replica, on that replica's device.

It differs from the variable of `tf.distribute.MirroredStrategy` in two points:
gradients of lookups come out dense, and where gradients are summed over the
replicas already a replica updates its own component by itself.
"""

import tensorflow as tf

from tfscale.distribute import _tf_internals


class MeshVariable(_tf_internals.MirroredVariable):
    """A variable with equal components on one device of every replica.

    Made by `MeshStrategy` for what is created in its scope, not by users.
    """

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        value = super()._dense_var_to_tensor(dtype, name, as_ref)
        if self.trainable and not tf.distribute.in_cross_replica_context():
            return dense_gradient(value)
        return value

    def _update_replica(self, update_fn, value, **kwargs):
        if self.distribute_strategy.extended.gradients_are_reduced:
            # Every replica computes the same value: nothing to aggregate.
            component = self._get_on_device_or_primary()
            with tf.device(component.device):
                return update_fn(component, value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


@tf.custom_gradient
def dense_gradient(x):
    """The same tensor, whose gradient is dense.

    The gradient of a lookup is a `tf.IndexedSlices` in which a row stands as
    often as it was looked up. Keras' optimizers square such slices before they
    add them up, and take norms of them as they are: both wrong. Dense, the
    rows are added up first.
    """
    return tf.identity(x), tf.convert_to_tensor
