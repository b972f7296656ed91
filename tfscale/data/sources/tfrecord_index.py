"""Where the records of a TFRecord file begin, read from their headers.

    length (8 bytes) | CRC of length (4) | data | CRC of data (4) | length ...

The headers are enough to count and to find; a file that ends in the middle of
a record, or whose length is damaged, is found before the first step.
"""

import contextlib
import dataclasses
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_LENGTH = struct.Struct("<Q")
_HEADER = 12
_FRAME = 16  # bytes of a record besides its data
_CHUNK = 4 << 20  # bytes read at a time from a server, which takes its time
_FAR = 64 << 10  # bytes between headers, where what lies between is left out
_FEW = 64  # records by which that is decided
_FIRST, _MOST = 2, 256  # records that are read in one go
_QUICK = 100e-6  # seconds for a header, at most, if no disk is waited for

_one_at_a_time = threading.Lock()


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

    def without(self, numbers: Sequence[int]) -> "FileIndex":
        """The index less some records, given by their numbers."""
        return dataclasses.replace(
            self,
            offsets=np.delete(self.offsets, numbers),
            sizes=np.delete(self.sizes, numbers),
        )


def scan(path: str) -> FileIndex:
    """Reads the headers of an uncompressed file.

    Returns:
        A `FileIndex`, up to the first damage to the framing.
    """
    end = tf.io.gfile.stat(path).length
    walk = _walk_chunks if "://" in path else _walk_local
    offsets, headers, at = walk(path, end)
    damage: tuple[int, str] | None = None
    if at < end:
        damage = (at, "the file ends within a record's header")
    elif at > end:
        damage = (offsets[-1], "the file ends within a record")
        offsets.pop()
    # Of all at once: in Python one takes longer than the rest of the loop.
    wrong = np.flatnonzero(~_match(headers))
    if wrong.size:
        # What follows was found by a wrong length.
        if wrong[0] < len(offsets):
            at = offsets[wrong[0]]
        elif damage is not None:
            at = damage[0]
        damage = (at, "a record's length is damaged")
        offsets = offsets[: wrong[0]]
        at = damage[0]
    elif damage:
        at = damage[0]
    ends = np.array([*offsets[1:], at] if offsets else [], np.int64)
    offsets = np.array(offsets, np.int64)
    return FileIndex(path, offsets, ends - offsets, damage)


def _walk_local(path, end):
    """Offsets of the records, their headers, and the offset behind the last.

    The last one may be of a record that is not all there.
    """
    offsets, at, last = [], 0, end - _FRAME
    headers = np.zeros([0, _HEADER], np.uint8)
    if last < 0:
        return offsets, headers, at
    with open(path, "rb") as file:
        number = file.fileno()
        with mmap.mmap(number, 0, access=mmap.ACCESS_READ) as data:
            at = _walk_mapped(data, offsets, at, last, _FEW)
            far = at > _FEW * _FAR
            if not far:
                at = _walk_mapped(data, offsets, at, last, None)
            bytes_ = np.frombuffer(data, np.uint8)
            places = np.array(offsets, np.int64)[:, None] + np.arange(_HEADER)
            headers = bytes_[places]
            del bytes_  # or the map cannot be closed
        if far:
            at, rest = _walk_far(number, offsets, at, last)
            headers = np.concatenate([headers, _rows(rest)])
    return offsets, headers, at


def _walk_mapped(data, offsets, at, last, most):
    """Goes on until there are `most` records; returns where it is then."""
    length_at, append = _LENGTH.unpack_from, offsets.append
    while at <= last and (most is None or len(offsets) < most):
        append(at)
        at += _FRAME + length_at(data, at)[0]
    return at


def _walk_far(number, offsets, at, last):
    """The rest of a file where each header is on a page of its own.

    A page that is mapped costs more than a call that copies 12 bytes, and who
    waits for it waits alone: the interpreter's lock is held. In such a call it
    is not, and other files go on.
    """
    headers: list[bytes] = []
    count, is_quick = _FIRST, True
    while at <= last:
        # Threads that take turns at each call would wait for the interpreter
        # most of the time; those that wait for a disk do not take part.
        with _one_at_a_time if is_quick else contextlib.nullcontext():
            begin = time.perf_counter()
            at = _walk_calls(number, offsets, headers, at, last, count)
            seconds = time.perf_counter() - begin
        is_quick = seconds < count * _QUICK
        count = min(2 * count, _MOST) if is_quick else _FIRST
    return at, headers


def _walk_calls(number, offsets, headers, at, last, count):
    """Goes on for at most `count` records; returns where it is then."""
    read, length_of = os.pread, _LENGTH.unpack_from
    for _ in range(count):
        if at > last:
            break
        header = read(number, _HEADER, at)
        offsets.append(at)
        headers.append(header)
        at += _FRAME + length_of(header)[0]
    return at


def _rows(headers):
    return np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER)


def _walk_chunks(path, end):
    """As `_walk_local`, through `tf.io.gfile`."""
    offsets, headers, at = [], [], 0
    with tf.io.gfile.GFile(path, "rb") as file:
        chunks = _Chunks(file)
        while at + _FRAME <= end:
            header = chunks.header_at(at)
            offsets.append(at)
            headers.append(header)
            at += _FRAME + _LENGTH.unpack_from(header)[0]
    return offsets, _rows(headers), at


class _Chunks:
    """Headers in a file that is read in large pieces, or by headers only."""

    def __init__(self, file):
        self._file = file
        self._chunk, self._begin = b"", 0

    def header_at(self, at):
        place = at - self._begin
        if place < 0 or place + _HEADER > len(self._chunk):
            # A record that is longer than what was read: the next one is, too.
            far = self._chunk and place > 2 * _CHUNK
            self._file.seek(at)
            self._chunk = self._file.read(_HEADER if far else _CHUNK)
            self._begin, place = at, 0
        return self._chunk[place : place + _HEADER]


def scan_compressed(path: str, compression: str) -> FileIndex:
    """Reads all of a compressed file, which has no offsets to begin at.

    The offsets in its `FileIndex` are records' numbers.
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


def compression_of(path: str) -> str:
    """The compression that a file begins with: `""`, `"GZIP"` or `"ZLIB"`."""
    with tf.io.gfile.GFile(path, "rb") as file:
        begin = file.read(2)
    if begin == b"\x1f\x8b":  # RFC 1952, section 2.3.1
        return "GZIP"
    # RFC 1950, section 2.2: deflate, and a checksum of both bytes.
    if begin[:1] == b"\x78" and int.from_bytes(begin, "big") % 31 == 0:
        return "ZLIB"
    return ""


def damaged_data(
    index: FileIndex, read: Callable[[np.int64], tf.data.Dataset]
) -> list[int]:
    """Numbers of the records whose data does not match its CRC.

    `read` returns a dataset that reads from an offset on.
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
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ 0x82F63B78, table >> 1)
    return table.astype(np.uint32)


_CRC_TABLE = _table()


def _match(rows: np.ndarray) -> np.ndarray:
    """Which headers' lengths match their CRC."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ rows[:, column]) & 0xFF]
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked == np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
