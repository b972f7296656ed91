"""Into how many microbatches a batch is cut: given, or found by its memory."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale import _internals
from tfscale.accumulation.memory import Memory
from tfscale.accumulation.microbatch_size import MicrobatchSize
from tfscale.collectives.workers import Workers


class GivenNumber:
    """As many as a user said; as many as rows if a batch has fewer.

    Args:
        number: How many.
    """

    def __init__(self, number: int):
        self.number: int | None = number

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """How many there are of a batch, a scalar of int32; in a graph."""
        return tf.clip_by_value(num_rows, 1, self.number)

    def run(self, step: Callable[[], Any]) -> Any:
        """Calls a step of `fit`."""
        return step()


class SmallestNumber:
    """As few as fit in memory.

    Args:
        model: The model, of which all variables are made.
        memory_limit: Bytes that each device may take, or None for what it has.
        workers: The processes whose replicas train with those of this one, or
            None. What does not fit one of them is too large for all: a step
            may exchange something in each microbatch.

    Attributes:
        number: None: it is no constant of the graph.
        found: How many there were in the last step, once it is decided.
    """

    def __init__(
        self,
        model: keras.Model,
        memory_limit: float | None,
        workers: Workers | None,
    ):
        self._workers = workers
        self.number: int | None = None
        self.found: int | None = None
        values = _values_of(model.variables + model.optimizer.variables)
        weights = _values_of(model.trainable_variables)
        self._memory = Memory({v.device for v in values}, memory_limit)
        self._memory.reset()
        # There will be sums of gradients, and the gradients of a microbatch.
        idle = self._memory.use_with(values, weights)
        both = self._memory.use_with(values, [*weights, *weights])
        self._size = MicrobatchSize(idle, both - idle)
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows = _internals.ResourceVariable(1, name="tfscale/rows")
            self._num_rows = _internals.ResourceVariable(
                0, name="tfscale/num_rows"
            )

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """See `GivenNumber`."""
        self._num_rows.assign(num_rows, read_value=False)
        return tf.maximum(-(-num_rows // self._rows.read_value()), 1)

    def run(self, step: Callable[[], Any]) -> Any:
        """See `GivenNumber`; decides on how many there are in the next one."""
        if self._size.is_found:
            return step()
        self._memory.reset()
        result = step()
        peak, num_rows = self._memory.use(), int(self._num_rows)
        if peak > 1.0 and self._size.rows == 1:
            warnings.warn(
                "Memory is too small for microbatches of one row. Received: "
                f"num_microbatches='auto', and a step that took {peak:.2f} "
                "of what devices may take. Go on with a larger "
                "`memory_limit`, or cut the model (`PipelineModel`).",
                stacklevel=2,
            )
        self._size.note(peak, num_rows)
        self._agree()
        self._rows.assign(self._size.rows)
        if self._size.is_found:
            self.found = -(-num_rows // self._size.rows)
        return result

    def _agree(self):
        if self._workers is None:
            return
        size = self._size
        own = tf.constant([[size.rows, int(size.is_found)]])
        rows, are_found = np.transpose(self._workers.all_gather(own))
        size.rows, size.is_found = int(min(rows)), bool(any(are_found))


def _values_of(variables):
    """What all devices have of variables of Keras."""
    values = [variable.value for variable in variables]
    return [
        component
        for value in values
        for component in getattr(value, "values", (value,))
    ]
