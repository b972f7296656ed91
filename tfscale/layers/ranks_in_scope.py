"""Builds layers that shard their own variables in a scope."""

import contextlib

import tensorflow as tf

from tfscale._internals import attributes


def num_ranks() -> int:
    """The number of devices over which new variables are sharded."""
    extended = tf.distribute.get_strategy().extended
    return getattr(extended, "num_model_ranks", 1)


def building() -> contextlib.AbstractContextManager:
    """Within it, variables are created at once, if there are ranks.

    In a model that `fit` builds they would be created after all layers are
    built, when their layer is not known any more.
    """
    if num_ranks() == 1:
        return contextlib.nullcontext()
    return attributes.variables_created_eagerly()
