"""ArrayRecord files as a source, read at random through their library."""

import os

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import from_python
from tfscale.data.sources.source import split_by_file
from tfscale.data.sources.source import unreadable
from tfscale.data.sources.source import warn_of_skipped


def array_records(
    pattern: file_source.Pattern, *, on_damage: str = "raise"
) -> IndexedSource:
    """Records are those of ArrayRecord files, serialized.

    They are read at random, through `array_record`, which tensorflow-datasets
    brings: an epoch is shuffled as a whole.

    Args:
        pattern: Path or glob, or a list of them.
        on_damage: `"raise"`, with the file and the record, or `"skip"`: what
            cannot be read is left out, and counted in a warning. That is
            decided before the first step, by reading everything once.

    Returns:
        A source of scalar strings.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file is no ArrayRecord file.

    Example:

    >>> import tempfile
    >>> from array_record.python import array_record_module
    >>> path = tempfile.mkdtemp() + "/a.array_record"
    >>> writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    >>> for record in (b"one", b"two"):
    ...     _ = writer.write(record)
    >>> writer.close()
    >>> array_records(path).num_records
    2
    """
    check_on_damage(on_damage)
    files = [_File(path) for path in file_source.match(pattern)]
    total = sum(len(file.records) for file in files)
    if on_damage == "skip":
        for file in files:
            file.skip_damaged()
    skipped = total - sum(len(file.records) for file in files)
    warn_of_skipped(skipped, f"records of {len(files)} ArrayRecord files")
    return _of_files(files, skipped)


class _File:
    """An ArrayRecord file, which each process opens when it reads.

    `records` are the numbers of the records that are read.
    """

    def __init__(self, path):
        self.path = path
        self._reader = None
        if not self._open().ok():
            raise data_loss(
                "An ArrayRecord file must be complete, closed by its writer, "
                f"and on a local disk. Received: file {path}, which is not."
            )
        self.records = np.arange(self._open().num_records())

    def _open(self):
        if self._reader is None:
            # Imported here, because it takes seconds.
            from array_record.python import array_record_module

            self._reader = array_record_module.ArrayRecordReader(self.path)
        return self._reader

    def read(self, numbers):
        try:
            return self._open().read([int(number) for number in numbers])
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                "A record cannot be read. Received: file "
                f"{self.path}, among records {list(numbers)[:8]}: {error} To "
                "leave damaged records out, use on_damage='skip'."
            ) from error

    def skip_damaged(self):
        """Reads all records, and leaves out those that cannot be read."""

        def read(first, last):
            try:
                self.read(self.records[first:last])
            except ValueError:
                self._reader = None  # a reader that failed always fails
                raise

        failures = unreadable(len(self.records), read)
        damaged = [number for number, _ in failures]
        self.records = np.delete(self.records, damaged)


def _of_files(files, skipped):
    counts = [len(file.records) for file in files]
    ends = np.cumsum(counts)

    def fetch(index):
        found = np.empty([len(index)], object)
        owners = np.searchsorted(ends, index, side="right")
        for number in np.unique(owners):
            file, wanted = files[number], np.flatnonzero(owners == number)
            begin = ends[number] - len(file.records)
            contents = file.read(file.records[index[wanted] - begin])
            for at, value in zip(wanted, contents, strict=True):
                found[at] = value
        return [found]

    about = repr([(f.path, os.path.getsize(f.path)) for f in files])
    spec = tf.TensorSpec([], tf.string)
    return IndexedSource(
        kind="array_records",
        num_records=int(ends[-1]),
        gather=lambda index: from_python(fetch, index, spec),
        identity=about.encode,
        split=split_by_file(
            files, counts, lambda shard: _of_files(shard, skipped)
        ),
        num_skipped=skipped,
    )
