"""Scopes that note the variables that code reads and assigns."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes


def outside_scopes(function: Callable, *args: Any) -> Any:
    """Calls a function without the scopes around the call.

    These are scopes of Keras, tapes, graphs and strategies, which belong to a
    thread: the function runs in a new one.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def plain_variable(
    value: Any, device: str | None = None, **options: Any
) -> tf.Variable:
    """A variable of TensorFlow on a device, and of no strategy.

    It is not trainable; `options` are others of `tf.Variable`.
    """

    def make():
        with tf.device(device):
            return tf.Variable(value, trainable=False, **options)

    return outside_scopes(make)


class _WithValues(keras.StatelessScope):
    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`; regularizers ask it, not variables."""
        value = super().get_current_value(variable)
        return attributes.value_of(variable) if value is None else value


class NotingScope(_WithValues):
    """A scope in which variables have their values, and no assignment stays.

    Attributes:
        read: Ids of the variables that were read, or assigned to, in it.
        changed: The variables that were assigned to.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.read: set[int] = set()
        self.changed: list[keras.Variable] = []
        self._graph = tf.compat.v1.get_default_graph()

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        self.read.add(id(variable))
        return super().get_current_value(variable)

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        variable, value = update
        self.read.add(id(variable))
        self.changed.append(variable)
        if tf.compat.v1.get_default_graph() is not self._graph:
            # A tensor of a loop or a branch is of no use outside of it.
            value = self.get_current_value(variable)
        super().add_update((variable, value))


class WrittenAtOnce(_WithValues):
    """Given variables have values of the scope, others are shared."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`; most are written at once."""
        variable, value = update
        if id(variable) in self.state_mapping:
            super().add_update(update)
        else:
            attributes.value_of(variable).assign(value)
