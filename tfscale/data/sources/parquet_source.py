"""Parquet files as a source: a row group is a block."""

import io
from collections.abc import Sequence

import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.arrow_values import plain
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.table_blocks import named
from tfscale.data.sources.table_blocks import table_blocks
from tfscale.data.sources.table_layout import TableLayout


def parquet(
    pattern: file_source.Pattern, *, columns: Sequence[str] | None = None
) -> BlockSource:
    """Records are the rows of Parquet files; needs pyarrow (`tfscale[tables]`).

    A row group is read as a whole, and is what a worker or a shuffle reads at
    a time.

    Args:
        pattern: String or path, or a list of them: paths or globs, also of a
            remote file system that `tf.io.gfile` knows.
        columns: List of strings, the columns to be read; by default all.

    Returns:
        A source of dicts from column to scalar tensor, or to a vector where the
        column has lists; structs are dicts, and lists of lists arrays, as in
        `json_lines`. Dates and times are the integers that
        the file has: dates are int32, days since 1970; timestamps are int64,
        in the column's own unit since 1970 (UTC where it has a time zone).
        What is missing is 0, NaN, "" or an empty vector.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file cannot be read.
        ValueError: If a column is missing, or holds none of numbers, dates,
            strings, and lists and structs of these.

    Example:

    >>> import os
    >>> import tempfile
    >>> import pyarrow
    >>> import pyarrow.parquet
    >>> path = os.path.join(tempfile.mkdtemp(), "a.parquet")
    >>> pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), path)
    >>> parquet(path).num_records
    2
    """
    from pyarrow import parquet as pyarrow_parquet  # an extra

    def opened(path):
        file = _Remote(path) if "://" in path else path
        return pyarrow_parquet.ParquetFile(file)

    blocks, schema = [], None
    for path in file_source.match(pattern):
        with named(path), opened(path) as file:
            about = [
                file.metadata.row_group(group)
                for group in range(file.metadata.num_row_groups)
            ]
            own = file.schema_arrow
        blocks += [
            (path, number, group.num_rows, group.total_byte_size)
            for number, group in enumerate(about)
        ]
        schema = schema or own
        _check_same(schema, own, columns, path)
    layout = TableLayout(schema, columns)

    def read(path, group):
        with named(path), opened(path) as file:
            return file.read_row_group(group, columns=layout.names)

    return table_blocks("parquet", blocks, layout, read, 0)


def _check_same(schema, own, columns, path):
    """Refuses a file whose columns, those that are read, are not the first's.

    Their order may differ, and whether some numbers are in a dictionary.
    """
    own, first = (
        {
            field.name: str(plain(field.type))
            for field in one
            if columns is None or field.name in columns
        }
        for one in (own, schema)
    )
    if own != first:
        raise ValueError(
            "Files must have the same columns. Received: "
            f"{path} with {own} after {first}."
        )


class _Remote(io.RawIOBase):
    """A file of `tf.io.gfile`, as Python's own files are."""

    def __init__(self, path):
        super().__init__()
        self._file = tf.io.gfile.GFile(path, "rb")

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._file.seek(offset, whence)
        return self._file.tell()

    def tell(self):
        return self._file.tell()

    def readinto(self, buffer):
        found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self):
        self._file.close()
        super().close()
