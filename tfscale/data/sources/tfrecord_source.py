"""TFRecord shards as a source."""

import os

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_blocks
from tfscale.data.sources import file_source
from tfscale.data.sources import index_files
from tfscale.data.sources import tfrecord_index
from tfscale.data.sources.source import DAMAGED
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import warn_of_skipped

# Beginning a block costs as much as reading 100 records, so a block has more
# small records. The default window (16 MiB) still mixes 128 blocks.
_SMALL_BLOCK_BYTES = 128 << 10


def tfrecords(
    pattern: file_source.Pattern,
    *,
    compression: str = "",
    on_damage: str = "raise",
    index_dir: str | os.PathLike[str] | None = None,
) -> BlockSource:
    """Records are those of TFRecord files, serialized.

    The files' headers are read once, here, many files at a time: how many
    records there are, and where, is known before the first step.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        compression: `""`, `"GZIP"` or `"ZLIB"`. Compressed files are read as
            wholes.
        on_damage: `"raise"`, with the file and the offset, or `"skip"`: damaged
            records are left out, and counted in a warning. All files are read
            once before the first step, so that workers agree on the number of
            batches.
        index_dir: String, a directory, also of a remote file system, that keeps
            the index of each uncompressed file, or None. Later runs and other
            workers use the index while size and time of the file are the same.

    Returns:
        A source of scalar strings.

    Raises:
        FileNotFoundError: If no file matches.
        ValueError: If a file begins as with another compression.
        tf.errors.DataLossError: If a file's framing is damaged or truncated.

    Example:

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/a.tfrecord"
    >>> with tf.io.TFRecordWriter(path) as writer:
    ...     writer.write(b"record")
    >>> tfrecords(path).num_records
    1
    """
    check_on_damage(on_damage)
    if compression not in ("", "GZIP", "ZLIB"):
        raise ValueError(
            '`compression` must be "", "GZIP" or "ZLIB". '
            f"Received: compression={compression!r}."
        )

    def scan(path):
        if compression:
            return tfrecord_index.scan_compressed(path, compression)
        return tfrecord_index.scan(path)

    indices, skipped = [], 0
    paths = file_source.match(pattern)
    kept_in = None if compression else index_dir
    for index in index_files.index_files(paths, scan, kept_in):
        path = index.path
        if index.damage and not len(index.offsets):
            _check_compression(path, compression)
        if index.damage and on_damage == "raise":
            offset, reason = index.damage
            raise data_loss(
                f"A TFRecord file is damaged: {reason}. Received: file "
                f"{path}, offset {offset}. To leave out what cannot be read, "
                "use on_damage='skip'."
            )
        skipped += index.damage is not None
        if on_damage == "skip" and not compression:
            damaged = tfrecord_index.damaged_data(index)
            skipped += len(damaged)
            index = index.without(damaged)
        indices.append(index)
    warn_of_skipped(
        skipped,
        f"records of {len(indices)} TFRecord files",
        " (the rest of a file whose framing is damaged counts as one)",
    )
    return _source(indices, compression, skipped)


def _check_compression(path, compression):
    found = tfrecord_index.compression_of(path)
    if found != compression:
        raise ValueError(
            "`compression` must match the files. Received: "
            f"compression={compression!r}, and {path} begins like {found!r}. "
            f"Use compression={found!r}."
        )


def _source(indices, compression, skipped):
    blocks = []
    for number, index in enumerate(indices):
        # Lists: reading a number of an array takes ten times longer.
        offsets = index.offsets.tolist()
        ends = [0, *np.cumsum(index.sizes).tolist()]
        for first, last in _runs_of(index, whole=bool(compression)):
            size = ends[last] - ends[first]
            blocks.append((number, last - first, offsets[first], size))

    def read(block):
        count = block.count
        if compression:
            records = tf.data.TFRecordDataset(block.path, compression)
        else:
            records = tfrecord_index.from_offset(
                block.path, block.begin, block.size
            )
        whole = records.take(count).batch(count, drop_remainder=True)
        # `range` ends it: a file that cannot be opened fails for ever.
        counted = tf.data.Dataset.zip(tf.data.Dataset.range(count), records)
        damaged = tf.data.Dataset.from_tensors((np.int64(0), DAMAGED))
        up_to_damage = (
            counted.ignore_errors()
            .concatenate(damaged.repeat(count))
            .map(lambda _, record: record)
            .batch(count, drop_remainder=True)
        )
        # The second only starts if the first one fails.
        either = tf.data.Dataset.zip(tf.data.Dataset.range(1), whole)
        either = either.ignore_errors().map(lambda _, records: records)
        return either.concatenate(up_to_damage).take(1)

    return file_blocks.source_of_files(
        "tfrecords",
        indices,
        [index.path for index in indices],
        blocks,
        read,
        lambda share: _source(share, compression, skipped),
        np.concatenate([index.offsets for index in indices]),
        num_skipped=skipped,
    )


def _runs_of(index, *, whole):
    count = len(index.offsets)
    if whole:
        return [(0, count)] if count else []
    ends = index.offsets + index.sizes
    # After a damaged record, a new run begins.
    gaps = np.flatnonzero(ends[:-1] != index.offsets[1:]) + 1
    return file_blocks.runs_of(index.offsets, gaps.tolist(), _SMALL_BLOCK_BYTES)
