"""Parquet files as a source: their row groups are its blocks."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence

import tensorflow as tf

from tfscale.data.sources import arrow_columns
from tfscale.data.sources import file_source
from tfscale.data.sources import table_files
from tfscale.data.sources.arrow_columns import ArrowColumns
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.table_files import TableBlock
from tfscale.data.sources.table_files import TableFile


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise data_loss(
            "A file cannot be read: it is damaged, or of another format. "
            f"Received: file {path}: {error}"
        ) from error


class _RemoteFile(tf.io.gfile.GFile):
    """With the attribute that pyarrow asks of Python's files."""

    closed = False


def parquet(
    pattern: file_source.Pattern, *, columns: Sequence[str] | None = None
) -> BlockSource:
    """Records are the rows of Parquet files; needs pyarrow (`tfscale[tables]`).

    Workers and shuffles read whole row groups.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        columns: List of strings, the columns to be read; by default all.

    Returns:
        A source of dicts from column to scalar tensor, or to a vector where the
        column has lists; structs are dicts, and lists of lists arrays, as in
        `json_lines`. Dates and times are the integers that
        the file has: dates are int32, days since 1970; timestamps are int64,
        in the column's own unit since 1970 (UTC where it has a time zone).
        A missing value is 0, NaN, "" or an empty vector.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file cannot be read.
        ValueError: If a column is missing, or holds none of numbers, dates,
            strings, and lists and structs of these.

    Example:

    >>> import tempfile
    >>> import pyarrow.parquet
    >>> path = tempfile.mkdtemp() + "/a.parquet"
    >>> pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), path)
    >>> parquet(path).num_records
    2
    """
    from pyarrow import parquet as pyarrow_parquet  # an extra

    def opened(path):
        file = _RemoteFile(path, "rb") if "://" in path else path
        return pyarrow_parquet.ParquetFile(file)

    files, schema = [], None
    for path in file_source.match(pattern):
        with _named(path), opened(path) as file:
            groups = map(
                file.metadata.row_group, range(file.metadata.num_row_groups)
            )
            blocks = [
                TableBlock(number, group.total_byte_size, group.num_rows)
                for number, group in enumerate(groups)
            ]
            file_schema = file.schema_arrow
        files.append(TableFile(path, blocks))
        schema = schema or file_schema
        _check_same(schema, file_schema, columns, path)
    found = ArrowColumns(schema, columns)

    def read(path, block):
        with _named(path), opened(path) as file:
            table = file.read_row_group(block.begin, columns=found.names)
        return found.read(table)

    return table_files.source_of("parquet", files, found.rows, read)


def _check_same(schema, file_schema, columns, path):
    """Refuses a file whose columns differ from those of the first file.

    Their order may differ, and so may dictionary encoding.
    """
    file_schema, first = (
        {
            field.name: str(arrow_columns.without_dictionary(field.type))
            for field in one
            if columns is None or field.name in columns
        }
        for one in (file_schema, schema)
    )
    if file_schema != first:
        raise ValueError(
            "Files must have the same columns. Received: "
            f"{path} with {file_schema} after {first}."
        )
