"""Variables that a step assigns to, and variables that it adds to.

Several workers run a step at the same time. A variable that is read, changed
and written back has lost what another worker did in between. For weights and
slots that is asynchronous training; for counters and metrics it is wrong.

    metrics               begin at zero in each step, which hands over what it
                          adds; the chief adds it up
    counters (integers)   are read once; their increase is added on the server
    all others            are written at once, the last one wins
"""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs.noting_scope import WrittenAtOnce


class WorkerScope(WrittenAtOnce):
    """Within it a step runs on a worker; see the module."""

    def __init__(
        self,
        metrics: Iterable[keras.Variable],
        counters: Iterable[keras.Variable],
    ):
        self._metrics = list(metrics)
        # Read once: increments of other workers do not belong to this step.
        self._counters = [
            (v, tf.identity(attributes.value_of(v))) for v in counters
        ]
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        super().__init__([*zeros, *self._counters], collect_losses=True)

    def finish(self) -> list[tf.Tensor]:
        """Adds up counters; returns what the step adds to variables of metrics.

        Called in the step, after the scope.
        """
        for variable, old in self._counters:
            new = self.get_current_value(variable)
            if new is not old:
                attributes.value_of(variable).assign_add(new - old)
        return [self.get_current_value(v) for v in self._metrics]
