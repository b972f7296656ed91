"""A cache in memory that is filled as records are read, by their numbers.

`Dataset.cache` stores an order: the second epoch would repeat the first one's,
and an epoch entered in its middle would leave it broken. A table from record
number to record serves any order, at any position, in any epoch.
"""

import keras
import tensorflow as tf


class MemoryCache:
    """Parsed records in memory, under their numbers.

    Args:
        spec: Structure of `tf.TensorSpec`, what a record is.
        num_records: Integer.
    """

    def __init__(self, spec, num_records):
        self._spec = spec
        self._num_records = num_records
        with tf.init_scope(), tf.device("CPU:0"):
            self._tables = [
                tf.lookup.experimental.MutableHashTable(tf.int64, tf.string, "")
                for _ in keras.tree.flatten(spec)
            ]

    def is_full(self):
        """Whether every record is there: a bool scalar tensor; for tf.data."""
        return self._tables[0].size() >= self._num_records

    def has(self, index):
        """Whether a record is there: a bool scalar tensor; for tf.data."""
        return tf.strings.length(self._tables[0].lookup(index)) > 0

    def get_or_make(self, index, make):
        """The record, which is made and kept if it is not there.

        Args:
            index: int64 scalar tensor, the record's number.
            make: Function without arguments that returns the record.

        Returns:
            A structure of tensors of the `spec`.
        """
        first = self._tables[0].lookup(index)

        def hit():
            rest = [table.lookup(index) for table in self._tables[1:]]
            return self._parse([first, *rest])

        def miss():
            record = make()
            keep = [
                tf.io.serialize_tensor(part)
                for part in keras.tree.flatten(record)
            ]
            # The first table last: who finds a record there finds all of it.
            stored = [
                table.insert(index, value)
                for table, value in zip(self._tables[1:], keep[1:])
            ]
            with tf.control_dependencies(stored):
                done = self._tables[0].insert(index, keep[0])
            with tf.control_dependencies([done]):
                return keras.tree.map_structure(tf.identity, record)

        return tf.cond(tf.strings.length(first) > 0, hit, miss)

    def _parse(self, values):
        parts = [
            tf.ensure_shape(tf.io.parse_tensor(value, spec.dtype), spec.shape)
            for value, spec in zip(values, keras.tree.flatten(self._spec))
        ]
        return keras.tree.pack_sequence_as(self._spec, parts)
