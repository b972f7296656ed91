"""Records in files of their components, which are read in any order.

    0.bin        the first component of record 0, of record 1, ...
    1.bin        the second one, strings of any size
    1.begin.bin  where each of them begins; the last number is the end
    sums.bin     a fingerprint of 64 bits for each component of each record

A file is mapped into memory: a batch of rows is one gather, and they stay in
the machine's page cache. Components of no fixed size are kept as strings.
"""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

_SUMS = "sums.bin"
_SUM_BYTES = 8
_WRITTEN = 256  # records at a time
_STRING = tf.TensorSpec([], tf.string)


class ComponentFiles:
    """The records of a directory; `specs` are those of their components."""

    def __init__(
        self, directory: str, specs: Sequence[tf.TensorSpec], num_records: int
    ):
        self._directory = directory
        self._specs = specs
        self._num_records = num_records

    @tf.autograph.experimental.do_not_convert
    def read(self, index: tf.Tensor) -> list[tf.Tensor]:
        """Components of the records of `index`, compared with their sums."""
        rows = tf.reshape(index, [-1])
        kept = [
            self._read(number, spec, rows)
            for number, spec in enumerate(self._specs)
        ]
        sums = tf.gather(
            self._mapped(_SUMS, tf.uint8, [len(kept) * _SUM_BYTES]), rows
        )
        wrong = tf.reduce_any(sums != _sums(kept), axis=1)
        check = tf.raw_ops.Assert(
            condition=tf.logical_not(tf.reduce_any(wrong)),
            data=[
                "A record of a cache is damaged. Received: cache",
                self._directory,
                "record",
                tf.boolean_mask(rows, wrong)[:1],
                "Delete that directory.",
            ],
        )
        with tf.control_dependencies([check]):
            return [
                _deserialized(tf.identity(component), spec, index)
                for component, spec in zip(kept, self._specs, strict=True)
            ]

    def _read(self, number, spec, rows):
        path = f"{number}.bin"
        if _is_row(spec):
            return tf.gather(self._mapped(path, spec.dtype, spec.shape), rows)
        begins = self._mapped(_begins(number), tf.int64, [], more=1)
        whole = self._file(path, tf.uint8, [self._size(path)])

        def read_one(row):
            begin = tf.gather(begins, row)
            size = tf.gather(begins, row + 1) - begin
            # The bytes are the end of the message.
            message = tf.io.serialize_tensor(
                tf.slice(whole, begin[None], size[None])
            )
            return tf.strings.substr(message, -size, size)

        return tf.map_fn(read_one, rows, fn_output_signature=tf.string)

    def _mapped(self, name, dtype, shape, more=0):
        return self._file(name, dtype, [self._num_records + more, *shape])

    def _file(self, name, dtype, shape):
        mapped = tf.raw_ops.ImmutableConst(
            dtype=dtype,
            shape=shape,
            memory_region_name=os.path.join(self._directory, name),
        )
        return tf.ensure_shape(mapped, shape)

    def _size(self, name):
        return os.path.getsize(os.path.join(self._directory, name))


def write(
    directory: str,
    records: tf.data.Dataset,
    specs: Sequence[tf.TensorSpec],
    disk: Callable[[], AbstractContextManager[Any]],
) -> int:
    """Writes records, some hundreds at a time; returns their number.

    `records` are tuples of components. `disk` explains errors of writing;
    reading fails for other reasons.
    """

    @tf.autograph.experimental.do_not_convert
    def kept(*record):
        return tuple(map(_serialized, record, specs))

    @tf.autograph.experimental.do_not_convert
    def with_sums(*kept):
        return kept, _sums(kept)

    batches = records.map(kept).batch(_WRITTEN).map(with_sums)
    count = 0
    with contextlib.ExitStack() as stack:

        def opened(name):
            # Without buffers, so that closing cannot fail.
            path = os.path.join(directory, name)
            return stack.enter_context(open(path, "wb", buffering=0))

        with disk():
            writers = [
                (_RowWriter if _is_row(spec) else _StringWriter)(number, opened)
                for number, spec in enumerate(specs)
            ]
            sums_file = opened(_SUMS)
        for batch, sums in batches.as_numpy_iterator():
            with disk():
                for writer, values in zip(writers, batch, strict=True):
                    writer.write(values)
                _write_all(sums_file, sums.tobytes())
            count += len(sums)
        with disk():
            for writer in writers:
                writer.end()
    return count


class _RowWriter:
    def __init__(self, number, opened):
        self._file = opened(f"{number}.bin")

    def write(self, values):
        _write_all(self._file, values.tobytes())

    def end(self):
        pass


class _StringWriter(_RowWriter):
    def __init__(self, number, opened):
        super().__init__(number, opened)
        self._begins = opened(_begins(number))
        self._end = 0

    def write(self, values):
        _write_all(self._file, b"".join(values))
        ends = self._end + np.cumsum([0, *map(len, values)], dtype=np.int64)
        _write_all(self._begins, ends[:-1].tobytes())
        self._end = ends[-1]

    def end(self):
        _write_all(self._begins, np.int64(self._end).tobytes())
        _write_all(self._file, b"\0")  # no file without a byte is mapped


def _begins(number):
    return f"{number}.begin.bin"


def _is_row(spec):
    return bool(spec.dtype != tf.string and spec.shape.num_elements())


def _serialized(tensor, spec):
    if _is_row(spec) or spec.is_compatible_with(_STRING):
        return tensor
    return tf.io.serialize_tensor(tensor)


def _deserialized(kept, spec, index):
    """Components of records, of the shape of `index`."""
    if not _is_row(spec) and not spec.is_compatible_with(_STRING):

        def parse(one):
            tensor = tf.io.parse_tensor(one, spec.dtype)
            return tf.ensure_shape(tensor, spec.shape)

        if index.shape.rank == 0:
            return parse(kept[0])
        return tf.map_fn(parse, kept, fn_output_signature=spec)
    return tf.reshape(kept, tf.concat([tf.shape(index), spec.shape], 0))


def _sums(kept):
    return tf.concat(
        [
            tf.raw_ops.Fingerprint(data=tensor, method="farmhash64")
            for tensor in kept
        ],
        axis=1,
    )


def _write_all(file, data):
    """Writes all bytes: an unbuffered file may take fewer."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
