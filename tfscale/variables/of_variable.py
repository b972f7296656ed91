"""The sharding of a variable of Keras or TensorFlow."""

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.variables.sharding import Sharding


def sharding_of(variable) -> Sharding:
    """How a variable is sharded; one of no mesh is whole."""
    return getattr(value_of(variable), "sharding", None) or _whole(variable)


def state_sharding_of(variable) -> Sharding:
    """How the optimizer's states of a variable are sharded."""
    value = value_of(variable)
    return getattr(value, "state_sharding", None) or _whole(variable)


def are_states_on_host(variable) -> bool:
    """Whether the optimizer's states of a variable are on the host."""
    return getattr(value_of(variable), "are_states_on_host", False)


def is_updating() -> bool:
    """Whether a strategy updates a component, by `extended.update`."""
    if not tf.distribute.in_cross_replica_context():
        return False
    return symbols.get_current_replica_id_as_int() is not None


def is_overwritten(variable) -> bool:
    """Whether an optimizer overwrites a variable with its gradient.

    So Keras keeps the scales of float8.
    """
    # A distributed variable, asked for the attribute, would read its value.
    return (
        isinstance(variable, keras.Variable)
        and variable.overwrite_with_gradient
    )


def value_of(variable):
    """The TensorFlow variable of one of Keras, or itself."""
    if isinstance(variable, keras.Variable):
        return attributes.value_of(variable)
    return variable


def _whole(variable):
    return Sharding(tuple(variable.shape), tf.as_dtype(variable.dtype).size)
