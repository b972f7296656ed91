"""The number of microbatches of a batch."""

import tensorflow as tf

from tfscale._internals import symbols


class GivenNumber:
    """The user's number; fewer for a batch with fewer rows."""

    def __init__(self, number: int):
        self.number: int | None = number

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """How many microbatches a batch has, a scalar of int32; in a graph."""
        return tf.clip_by_value(num_rows, 1, self.number)


class GivenRows:
    """The smallest number of microbatches with at most `max_rows` rows.

    `number` is None, because it is no constant of the graph.
    """

    def __init__(self, rows: int):
        self.number: int | None = None
        self._rows = rows
        with tf.init_scope(), tf.device("CPU:0"):
            self._largest = symbols.ResourceVariable(
                0, name="tfscale/num_microbatches"
            )

    @property
    def found(self) -> int | None:
        """The number for the largest batch so far; None before the first."""
        return int(self._largest) or None

    def count(self, num_rows: tf.Tensor) -> tf.Tensor:
        """See `GivenNumber`."""
        count = tf.maximum(-(-num_rows // self._rows), 1)
        largest = tf.maximum(self._largest.read_value(), count)
        self._largest.assign(largest, read_value=False)
        return count
