"""Records of fixed size in files of rows, which are read in any order.

    0.bin    the first component of record 0, of record 1, ...
    sums.bin    a fingerprint of 64 bits for each component of each record

A file is mapped into memory: a batch of records is one gather, and rows stay in
the machine's page cache.
"""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

_SUMS = "sums.bin"
_SUM_BYTES = 8
_WRITTEN = 256  # records at a time


def suits(specs: Sequence[tf.TensorSpec]) -> bool:
    """Whether records of these components have a fixed size."""
    return all(
        spec.dtype != tf.string and spec.shape.num_elements() for spec in specs
    )


class RowFile:
    """Records of a fixed size: a row of each in a file for each of `specs`."""

    def __init__(
        self, directory: str, specs: Sequence[tf.TensorSpec], num_records: int
    ):
        self._directory = directory
        self._specs = specs
        self._num_records = num_records

    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by its name."""
        sizes = {
            f"{number}.bin": self._num_records
            * spec.dtype.size
            * spec.shape.num_elements()
            for number, spec in enumerate(self._specs)
        }
        sums = self._num_records * _SUM_BYTES * len(self._specs)
        return {**sizes, _SUMS: sums}

    def read(self, index: tf.Tensor) -> list[tf.Tensor]:
        """The components of records, compared with their sums."""
        rows = tf.reshape(index, [-1])
        tensors = [
            tf.gather(
                self._mapped(f"{number}.bin", spec.dtype, spec.shape), rows
            )
            for number, spec in enumerate(self._specs)
        ]
        kept = tf.gather(
            self._mapped(_SUMS, tf.uint8, [len(self._specs) * _SUM_BYTES]), rows
        )
        wrong = tf.reduce_any(kept != _sums(tensors), axis=1)
        check = check_record(
            self._directory,
            tf.logical_not(tf.reduce_any(wrong)),
            tf.boolean_mask(rows, wrong)[:1],
        )
        with tf.control_dependencies([check]):
            return [
                tf.reshape(tensor, tf.concat([tf.shape(index), spec.shape], 0))
                for tensor, spec in zip(tensors, self._specs, strict=True)
            ]

    def _mapped(self, name, dtype, shape):
        rows = tf.raw_ops.ImmutableConst(
            dtype=dtype,
            shape=[self._num_records, *shape],
            memory_region_name=os.path.join(self._directory, name),
        )
        return tf.ensure_shape(rows, [self._num_records, *shape])

    @classmethod
    def write(
        cls,
        directory: str,
        records: tf.data.Dataset,
        specs: Sequence[tf.TensorSpec],
        disk: Callable[[], AbstractContextManager],
    ) -> int:
        """Writes rows, some hundreds at a time; returns their number.

        `disk` explains errors of writing; reading fails for other reasons.
        """
        names = [*(f"{number}.bin" for number in range(len(specs))), _SUMS]
        batches = records.batch(_WRITTEN).map(
            lambda *tensors: (tensors, _sums(tensors))
        )
        count = 0
        with contextlib.ExitStack() as stack:
            with disk():
                # Without buffers, so that closing cannot fail.
                files = [
                    stack.enter_context(
                        open(os.path.join(directory, name), "wb", buffering=0)
                    )
                    for name in names
                ]
            for tensors, sums in batches.as_numpy_iterator():
                with disk():
                    for file, tensor in zip(
                        files, [*tensors, sums], strict=True
                    ):
                        _write_all(file, tensor.tobytes())
                count += len(sums)
        return count


def check_record(
    directory: str, is_whole: tf.Tensor, record: tf.Tensor
) -> tf.Operation:
    """An operation that fails, and names the record, if it is damaged."""
    return tf.raw_ops.Assert(
        condition=is_whole,
        data=[
            "A record of a cache is damaged. Received: cache",
            directory,
            "record",
            record,
            "Delete that directory.",
        ],
    )


def _write_all(file, data):
    """Writes all bytes: an unbuffered file may take fewer."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sums(tensors):
    return tf.concat(
        [
            tf.raw_ops.Fingerprint(data=tensor, method="farmhash64")
            for tensor in tensors
        ],
        axis=1,
    )
