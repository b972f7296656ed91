"""A cache in memory that is filled while records are read, by their numbers.

`Dataset.cache` stores an order: the second epoch would repeat the first one,
and an epoch entered in its middle would break the cache. One row of memory for
each record serves any order, position and epoch; a batch is one lookup.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.packing import Packing
from tfscale.graphs.noting_scope import plain_variable


class MemoryCache:
    """Parsed records of a `spec` in memory, by their numbers."""

    def __init__(self, spec: Any, num_records: int):
        self._packing = Packing(spec)
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows = [
                # Not initialized: the system allocates rows when written.
                # Outside of strategies: see `Position`.
                plain_variable(
                    tf.raw_ops.Empty(
                        shape=[num_records, *tensor.shape], dtype=tensor.dtype
                    ),
                    "CPU:0",
                )
                for tensor in self._packing.specs
            ]
            self._is_there = plain_variable(
                tf.zeros([num_records], tf.bool), "CPU:0"
            )

    def is_full(self) -> tf.Tensor:
        """Whether every record is there: a bool scalar tensor."""
        return tf.reduce_all(self._is_there.read_value())

    def get_or_make(self, index: tf.Tensor, make: Callable[[], Any]) -> Any:
        """Records of `index`, an int64 scalar or vector.

        If one is not there, `make()` returns them all, and they are kept.
        """

        def hit():
            tensors = [_gather(rows, index) for rows in self._rows]
            return self._packing.unpack(tensors)

        def miss():
            record = make()
            stored = [
                _scatter(rows, index, tensor)
                for rows, tensor in zip(
                    self._rows, self._packing.pack(record), strict=True
                )
            ]
            # Last, so that no record is there in part.
            with tf.control_dependencies(stored):
                done = _scatter(
                    self._is_there, index, tf.ones_like(index, tf.bool)
                )
            with tf.control_dependencies([done]):
                return keras.tree.map_structure(tf.identity, record)

        is_there = tf.reduce_all(_gather(self._is_there, index))
        return tf.cond(is_there, hit, miss)


@tf.autograph.experimental.do_not_convert
def _gather(rows, index):
    return tf.raw_ops.ResourceGather(
        resource=rows.handle, indices=index, dtype=rows.dtype
    )


@tf.autograph.experimental.do_not_convert
def _scatter(rows, index, values):
    return tf.raw_ops.ResourceScatterUpdate(
        resource=rows.handle, indices=index, updates=values
    )
