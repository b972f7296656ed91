"""The sharding of a variable, whoever made it."""

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.sharding.sharding import Sharding


def sharding_of(variable) -> Sharding:
    """How a variable is sharded over the mesh that it is on.

    Args:
        variable: A variable of Keras or TensorFlow; of no mesh, it is on one
            device.
    """
    return getattr(_value_of(variable), "sharding", None) or _whole(variable)


def state_sharding_of(variable) -> Sharding:
    """How the optimizer's states of a variable are sharded.

    Like the variable, and with `zero_stage=1` over the data axis too.

    Args:
        variable: See `sharding_of`.
    """
    value = _value_of(variable)
    return getattr(value, "state_sharding", None) or _whole(variable)


def _value_of(variable):
    if isinstance(variable, keras.Variable):
        return _internals.value_of(variable)
    return variable


def _whole(variable):
    return Sharding(tuple(variable.shape), tf.as_dtype(variable.dtype).size)
