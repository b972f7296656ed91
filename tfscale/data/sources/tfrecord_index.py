"""Where the records of a TFRecord file begin, read from their headers.

    length (8 bytes) | CRC of length (4) | data | CRC of data (4) | length ...

The headers are enough to count and to find; a file that ends in the middle of
a record, or whose length is damaged, is found before the first step.
"""

import dataclasses
import struct

import numpy as np
import tensorflow as tf

_HEADER = struct.Struct("<QI")
_FRAME = 16  # bytes of a record besides its data
_CHUNK = 1 << 18  # bytes read at a time


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The records of one file.

    Attributes:
        path: String.
        offsets: int64 array, where each record begins.
        sizes: int64 array, bytes of each record in the file.
        damage: Offset of what cannot be read, and why; else None.
    """

    path: str
    offsets: np.ndarray
    sizes: np.ndarray
    damage: tuple[int, str] | None

    def without(self, numbers):
        """The index less some records, given by their numbers."""
        return dataclasses.replace(
            self,
            offsets=np.delete(self.offsets, numbers),
            sizes=np.delete(self.sizes, numbers),
        )


def scan(path):
    """Reads the headers of an uncompressed file.

    Args:
        path: String.

    Returns:
        A `FileIndex`, up to the first damage to the framing.
    """
    offsets, sizes, damage = [], [], None
    end = tf.io.gfile.stat(path).length
    at, chunk, chunk_at = 0, b"", 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while at < end:
            if at + _HEADER.size > chunk_at + len(chunk):
                file.seek(at)
                chunk, chunk_at = file.read(_CHUNK), at
            if at + _HEADER.size > end:
                damage = (at, "the file ends within a record's header")
                break
            length, crc = _HEADER.unpack_from(chunk, at - chunk_at)
            begin = at - chunk_at
            if crc != _masked_crc(chunk[begin : begin + 8]):
                damage = (at, "a record's length is damaged")
                break
            if at + _FRAME + length > end:
                damage = (at, "the file ends within a record")
                break
            offsets.append(at)
            sizes.append(_FRAME + length)
            at += _FRAME + length
    return FileIndex(
        path, np.array(offsets, np.int64), np.array(sizes, np.int64), damage
    )


def scan_compressed(path, compression):
    """Reads all of a compressed file, which has no offsets to begin at.

    Args:
        path: String.
        compression: `"GZIP"` or `"ZLIB"`.

    Returns:
        A `FileIndex` whose offsets are records' numbers.
    """
    lengths = tf.data.TFRecordDataset(path, compression).map(tf.strings.length)
    sizes, damage = [], None
    try:
        for length in lengths.as_numpy_iterator():
            sizes.append(length + _FRAME)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        damage = (len(sizes), f"decompression stopped: {error.message}")
    return FileIndex(
        path, np.arange(len(sizes)), np.array(sizes, np.int64), damage
    )


def compression_of(path):
    """The compression that a file begins with: `""`, `"GZIP"` or `"ZLIB"`."""
    with tf.io.gfile.GFile(path, "rb") as file:
        begin = file.read(2)
    if begin == b"\x1f\x8b":  # RFC 1952, section 2.3.1
        return "GZIP"
    # RFC 1950, section 2.2: deflate, and a checksum of both bytes.
    if begin[:1] == b"\x78" and int.from_bytes(begin, "big") % 31 == 0:
        return "ZLIB"
    return ""


def damaged_data(index, read):
    """Numbers of the records whose data does not match its CRC.

    Args:
        index: `FileIndex`.
        read: Function from an offset to a dataset that reads from there.

    Returns:
        A list of integers.
    """
    damaged, number = [], 0
    while number < len(index.offsets):
        try:
            for _ in read(index.offsets[number]).take(
                len(index.offsets) - number
            ):
                number += 1
        except tf.errors.DataLossError:
            damaged.append(number)
            number += 1
    return damaged


def _table():
    # CRC-32C (Castagnoli), reflected: the checksum of RFC 3720, section 12.1.
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _table()


def _masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
