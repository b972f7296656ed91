"""The logs of a step: the means of all numbers, in one collective.

Keras asks for the mean of one number after the other. Over workers each would
take some milliseconds.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class PackedLogs:
    """The numbers of a step, and their means once requested.

    `local_values` gives a value's tensors of the replicas of this worker,
    `means` the means over all replicas of several lists of those.
    """

    def __init__(
        self,
        logs: Any,
        local_values: Callable[[Any], list[tf.Tensor]],
        means: Callable[[Sequence[list[tf.Tensor]]], list[tf.Tensor]],
    ):
        self._graph = tf.compat.v1.get_default_graph()
        self._means = means
        self._values = [
            (value, tensors)
            for value in tf.nest.flatten(logs)
            if _are_numbers(tensors := local_values(value))
        ]
        self._found: list[tf.Tensor] | None = None

    def take(self, value: Any) -> tf.Tensor | None:
        """The mean of a number of the step; None for any other value."""
        if self._graph is not tf.compat.v1.get_default_graph():
            return None
        for index, (each, _) in enumerate(self._values):
            if each is value:
                if self._found is None:
                    self._found = self._means([x for _, x in self._values])
                return self._found[index]
        return None


def _are_numbers(values):
    return all(x.dtype.is_floating and x.shape.rank == 0 for x in values)
