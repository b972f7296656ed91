"""The records of a TFRecord file, found by their headers.

    length (8 bytes) | CRC of length (4) | data | CRC of data (4) | length ...

A damaged length, or a file that ends within a record, is detected before the
first step.
"""

import dataclasses
import os
import struct
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_blocks

_LENGTH = struct.Struct("<Q")
_HEADER = 12
FRAME = 16  # bytes of a record besides its data
# Bytes that are read at a time; a request to a server takes long.
_LOCAL_CHUNK, _REMOTE_CHUNK = 64 << 10, 4 << 20


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The records of one file."""

    path: str
    offsets: np.ndarray  # int64, where each record begins
    sizes: np.ndarray  # int64, bytes of each record in the file
    damage: tuple[int, str] | None  # offset of what cannot be read, and why

    def without(self, numbers: Sequence[int]) -> "FileIndex":
        """The index without some records, given by their numbers."""
        return dataclasses.replace(
            self,
            offsets=np.delete(self.offsets, numbers),
            sizes=np.delete(self.sizes, numbers),
        )


def scan(path: str) -> FileIndex:
    """The index of an uncompressed file, up to damage to the framing."""
    end = tf.io.gfile.stat(path).length
    headers, at = _walk(path, end)
    sizes = headers[:, :8].copy().view("<u8")[:, 0] + np.uint64(FRAME)
    # Where records begin, and the end. The last size may be wrong.
    bounds = np.zeros(len(sizes) + 1, np.int64)
    bounds[1:-1] = np.cumsum(sizes[:-1])
    bounds[-1] = min(at, end)
    count, reason = len(sizes), None
    # All at once: in Python, one CRC takes longer than the rest of the loop.
    wrong = np.flatnonzero(~_match(headers))
    if wrong.size:  # later records were found by a wrong length
        count, reason = wrong[0], "a record's length is damaged"
    elif at > end:
        count, reason = count - 1, "the file ends within a record"
    elif at < end:
        reason = "the file ends within a record's header"
    bounds = bounds[: count + 1]
    damage = None if reason is None else (int(bounds[-1]), reason)
    return FileIndex(path, bounds[:-1], np.diff(bounds), damage)


def _walk(path, end):
    """The headers of the records, and the offset after the last record.

    The last record may be incomplete.
    """
    if "://" not in path:
        with open(path, "rb") as file:
            return _walk_chunks(os.pread, file.fileno(), end, _LOCAL_CHUNK)
    with tf.io.gfile.GFile(path, "rb") as file:

        def read(file, size, at):
            file.seek(at)
            return file.read(size)

        return _walk_chunks(read, file, end, _REMOTE_CHUNK)


def _walk_chunks(read, file, end, chunk_bytes):
    """`_walk`, by a function like `os.pread`."""
    length_of = _LENGTH.unpack_from
    headers, at, end = [], 0, end - FRAME
    add = headers.append
    while at <= end:
        last, chunk = at, read(file, chunk_bytes, at)
        if len(chunk) < _HEADER:
            break  # the file is shorter than it was
        limit = min(len(chunk) - _HEADER, end - last)
        within = 0
        while within <= limit:
            add(chunk[within : within + _HEADER])
            within += FRAME + length_of(chunk, within)[0]
        at = last + within
        # After a record that is longer than a chunk, the next one is, too.
        size = at - last
        while size > chunk_bytes and at <= end:
            header = read(file, _HEADER, at)
            if len(header) < _HEADER:
                break
            add(header)
            size = FRAME + length_of(header)[0]
            at += size
    rows = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER)
    return rows, at


def scan_compressed(path: str, compression: str) -> FileIndex:
    """Reads a whole compressed file, which cannot be entered at an offset.

    The offsets in its `FileIndex` are records' numbers.
    """
    lengths = tf.data.TFRecordDataset(path, compression).map(tf.strings.length)
    sizes, damage = [], None
    try:
        for length in lengths.as_numpy_iterator():
            sizes.append(length + FRAME)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        damage = (len(sizes), f"decompression stopped: {error.message}")
    return FileIndex(
        path, np.arange(len(sizes)), np.array(sizes, np.int64), damage
    )


def compression_of(path: str) -> str:
    """The compression by a file's first bytes: `""`, `"GZIP"` or `"ZLIB"`."""
    with tf.io.gfile.GFile(path, "rb") as file:
        begin = file.read(2)
    if begin == b"\x1f\x8b":  # RFC 1952, section 2.3.1
        return "GZIP"
    # RFC 1950, section 2.2: deflate, and a checksum of both bytes.
    if begin[:1] == b"\x78" and int.from_bytes(begin, "big") % 31 == 0:
        return "ZLIB"
    return ""


def from_offset(
    path: str | tf.Tensor, offset: tf.Tensor, buffer_bytes: int | tf.Tensor
) -> tf.data.Dataset:
    """The records of a file from an offset on; in a dataset's function only."""
    # TFRecordDatasetV2 loses its offsets when it is serialized (2.21), as for
    # each iterator, but not in a function of another dataset.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path],
        compression_type="",
        buffer_size=tf.cast(buffer_bytes, tf.int64),
        byte_offsets=tf.reshape(tf.cast(offset, tf.int64), [1]),
    )
    return tf.data.experimental.from_variant(
        variant, tf.TensorSpec([], tf.string)
    )


def damaged_data(index: FileIndex) -> list[int]:
    """Numbers of the records whose data does not match its CRC."""
    damaged, number = [], 0
    while number < len(index.offsets):
        offset = tf.data.Dataset.from_tensors(index.offsets[number])
        records = offset.flat_map(
            lambda at: from_offset(index.path, at, file_blocks.BLOCK_BYTES)
        )
        try:
            for _ in records.take(len(index.offsets) - number):
                number += 1
        except tf.errors.DataLossError:
            damaged.append(number)
            number += 1
    return damaged


def _table():
    # CRC-32C (Castagnoli), reflected: the checksum of RFC 3720, section 12.1.
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ 0x82F63B78, table >> 1)
    return table.astype(np.uint32)


_CRC_TABLE = _table()


def _match(rows: np.ndarray) -> np.ndarray:
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ rows[:, column]) & 0xFF]
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked == np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
