"""Sources of files that are read in blocks, runs of neighbors."""

import bisect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import split_by_file

# A choice: the unit of a shuffle and of a read.
_BLOCK_RECORDS = 128
BLOCK_BYTES = 2 << 20


class Block(NamedTuple):
    """Where a block is: scalar tensors, of int64 but for the path."""

    path: tf.Tensor
    file: tf.Tensor  # its number among the files
    first: tf.Tensor  # the number of its first record in the source
    count: tf.Tensor  # records
    begin: tf.Tensor  # its offset in the file, or its number there
    size: tf.Tensor  # bytes


def source_of_files(
    kind: str,
    files: Sequence[Any],
    paths: Sequence[str],
    blocks: Iterable[tuple[int, int, int, int]],
    read: Callable[[Block], tf.data.Dataset],
    build: Callable[[Sequence[Any]], BlockSource],
    offsets: np.ndarray | None = None,
    **kwargs: Any,
) -> BlockSource:
    """A source of the blocks of files, in their order.

    Args:
        kind: The builder's name.
        files: Arguments from which `build` creates a source, see
            `split_by_file`.
        paths: The path of each file.
        blocks: File, records, begin and bytes of each block; see `Block`.
        read: See `read_block` of `BlockSource`.
        build: See `split_by_file`.
        offsets: Where each record is in its file; by default, its number.
        **kwargs: Arguments of `BlockSource`.
    """
    table = np.array(list(blocks), np.int64).reshape(-1, 4)
    file, count, *_ = table.T
    firsts = np.cumsum(count) - count
    counts = np.bincount(file, count, len(paths)).astype(np.int64)
    all_paths = tf.constant(paths, tf.string)
    # Not `tf.unstack` of a row: it ends the process in an interleave (2.21).
    columns = [tf.constant(c) for c in (file, firsts, *table.T[1:])]
    ends = tf.constant(np.cumsum(counts))
    all_offsets = None if offsets is None else tf.constant(offsets, tf.int64)

    def read_block(number):
        numbers = [tf.gather(column, number) for column in columns]
        return read(Block(tf.gather(all_paths, numbers[0]), *numbers))

    def locate(record):
        file = tf.searchsorted(ends, record[tf.newaxis], side="right")[0]
        offset = record
        if all_offsets is not None:
            offset = tf.gather(all_offsets, record)
        return tf.gather(all_paths, file), offset

    return BlockSource(
        kind=kind,
        blocks=table[:, [1, 3]],
        read_block=read_block,
        locate=locate,
        split=split_by_file(files, counts.tolist(), build),
        identity=lambda: repr(list(paths)).encode() + table.tobytes(),
        **kwargs,
    )


def runs_of(
    begins: np.ndarray, gaps: Iterable[int] = (), small_bytes: int = 0
) -> list[tuple[int, int]]:
    """Runs of neighbors, `(first, last)`, that are read as blocks.

    A new run begins at each of the numbers in `gaps`. A run may have more
    records than others if they are of `small_bytes` together.
    """
    at, runs, first = begins.tolist(), [], 0
    for gap in (*gaps, len(at)):
        while first < gap:
            large, small = (
                bisect.bisect_right(at, at[first] + size, first, gap)
                for size in (BLOCK_BYTES, small_bytes)
            )
            last = max(min(large, first + _BLOCK_RECORDS), small)
            runs.append((first, last))
            first = last
    return runs
