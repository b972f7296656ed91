"""Records with strings, one after the other in a TFRecord file."""

import os
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf

from tfscale.data.caches.row_file import check_record
from tfscale.data.sources import tfrecord_index

_RECORDS, _OFFSETS = "records.tfrecord", "offsets.npy"


class StringFile:
    """Records of any size, serialized, with the methods of `RowFile`."""

    def __init__(
        self, directory: str, specs: Sequence[tf.TensorSpec], num_records: int
    ):
        self._directory = directory
        self._specs = specs
        self._path = os.path.join(directory, _RECORDS)
        offsets = np.load(os.path.join(directory, _OFFSETS))
        if len(offsets) != num_records + 1:
            raise ValueError(f"{len(offsets)} offsets of {num_records} records")
        self._end = int(offsets[-1])
        self._offsets = tf.constant(offsets)

    def sizes(self) -> dict[str, int]:
        """The bytes of the file of records."""
        return {_RECORDS: self._end}

    def read(self, index: tf.Tensor) -> list[tf.Tensor]:
        """The components of records, one by one."""
        if index.shape.rank == 0:
            return self._read_one(index)
        return tf.map_fn(
            self._read_one, index, fn_output_signature=list(self._specs)
        )

    def _read_one(self, index):
        offset = tf.gather(self._offsets, index)
        size = tf.gather(self._offsets, index + 1) - offset
        records = tfrecord_index.from_offset(self._path, offset, size)
        # An error of the file does not name the record. `range` ends it: a
        # file that cannot be opened fails for ever.
        record = tf.data.Dataset.zip(tf.data.Dataset.range(1), records)
        nothing = tf.data.Dataset.from_tensors((np.int64(1), ""))
        failed, value = (
            record.ignore_errors()
            .concatenate(nothing)
            .take(1)
            .get_single_element()
        )
        check = check_record(self._directory, tf.equal(failed, 0), index)
        with tf.control_dependencies([check]):
            tensors = tf.io.parse_tensor(value, tf.string)
        return [
            tf.ensure_shape(tf.io.parse_tensor(tensor, spec.dtype), spec.shape)
            for tensor, spec in zip(
                tf.unstack(tensors, num=len(self._specs)), self._specs
            )
        ]

    @classmethod
    def write(
        cls,
        directory: str,
        records: tf.data.Dataset,
        specs: Sequence[tf.TensorSpec],
        disk: Callable[[], AbstractContextManager],
    ) -> int:
        """Writes records, and their offsets; returns their number."""
        del specs

        def serialize(*tensors):
            return tf.io.serialize_tensor(
                tf.stack([tf.io.serialize_tensor(tensor) for tensor in tensors])
            )

        sizes = []
        writer = tf.io.TFRecordWriter(os.path.join(directory, _RECORDS))
        for value in records.map(serialize).as_numpy_iterator():
            with disk():
                writer.write(value)
            sizes.append(len(value) + tfrecord_index.FRAME)
        with disk():
            writer.close()
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            np.save(os.path.join(directory, _OFFSETS), offsets)
        return len(sizes)
