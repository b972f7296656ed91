"""Files of tables as sources, read in blocks of rows through pyarrow."""

import contextlib
import io
import json
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_blocks
from tfscale.data.sources import file_source
from tfscale.data.sources import table_columns
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import from_python
from tfscale.data.sources.source import warn_of_skipped
from tfscale.data.sources.table_columns import TableColumns

_BLOCK_BYTES = 1 << 20  # of JSON, parsed at a time


def source_of_files(
    kind: str,
    files: Sequence[tuple[str, list[tuple[int, int]]]],
    spec: Any,
    read: Callable[[str, int], list[np.ndarray]],
    decode: Callable[[Any], Any] | None = None,
    skipped: int = 0,
) -> BlockSource:
    """A source of the rows of files, in their order.

    `files` are their paths and the numbers of rows and bytes of their blocks;
    `read` takes a path and a block's number, and returns arrays in the order
    of the flat `spec` of a row.
    """
    files = [file for file in files if any(rows for rows, _ in file[1])]

    def fetch(block):
        number, begin, count = block.tolist()
        path = files[number][0]
        try:
            arrays = read(path, begin)
        except ValueError as error:
            raise ValueError(f"{error} File {path}.") from error
        if len(arrays[0]) != count:
            raise data_loss(
                "A file must not change after its source was created. "
                f"Received: file {path} with {len(arrays[0])} rows where there "
                f"were {count}."
            )
        return arrays

    def read_block(block):
        where = tf.stack([block.file, block.begin, block.count])
        return tf.data.Dataset.from_tensors(from_python(fetch, where, spec))

    return file_blocks.source_of_files(
        kind,
        files,
        [path for path, _ in files],
        [
            (number, rows, begin, size)
            for number, (_, sizes) in enumerate(files)
            for begin, (rows, size) in enumerate(sizes)
            if rows
        ],
        read_block,
        lambda share: source_of_files(kind, share, spec, read, decode, skipped),
        record_spec=spec,
        decode=decode,
        num_skipped=skipped,
    )


@contextlib.contextmanager
def _named(path):
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
            sizes = [
                (group.num_rows, group.total_byte_size) for group in groups
            ]
            file_schema = file.schema_arrow
        files.append((path, sizes))
        schema = schema or file_schema
        _check_same(schema, file_schema, columns, path)
    found = TableColumns(schema, columns)

    def read(path, group):
        with _named(path), opened(path) as file:
            table = file.read_row_group(group, columns=found.names)
        return found.arrays(table)

    return source_of_files("parquet", files, found.spec, read, found.decode)


def _check_same(schema, file_schema, columns, path):
    """Refuses a file whose columns differ from those of the first file.

    Their order may differ, and so may dictionary encoding.
    """
    file_schema, first = (
        {
            field.name: str(table_columns.without_dictionary(field.type))
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


def json_lines(
    pattern: file_source.Pattern,
    *,
    columns: Sequence[str] | None = None,
    on_damage: str = "raise",
) -> BlockSource:
    """Records are the lines of JSON files; needs pyarrow (`tfscale[tables]`).

    A file is read as a whole, so it must fit the memory. Every line is looked
    at once, here: one that cannot be read is found before the first step.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        columns: List of strings, the keys to be read; by default all.
        on_damage: `"raise"`, with the file and the line, or `"skip"`: lines
            that cannot be read are left out, and counted in a warning.

    Returns:
        A source of dicts from column to scalar tensor, or to a vector where the
        column has lists. An object is a dict, a list of objects a dict of
        lists, and a list of lists an array, in which the lists of a record have
        one length. A missing value is 0, NaN, "" or an empty vector, also where
        a file never has the key. Dates are strings; numbers are int64, or
        float64 where one of the column is a fraction or beyond 64 bits.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a line cannot be read.
        ValueError: If a column is missing, or holds none of numbers, strings,
            and lists and objects of these, or not always the same.

    Example:

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/a.jsonl"
    >>> tf.io.write_file(path, '{"x": 1}' + chr(10) + '{"x": 2}' + chr(10))
    >>> json_lines(path).num_records
    2
    """
    check_on_damage(on_damage)
    files, damaged, schema = [], {}, None
    for path in file_source.match(pattern):
        table, damaged[path] = _table_and_damaged(path, columns)
        if damaged[path] and on_damage == "raise":
            number, reason = min(damaged[path].items())
            raise data_loss(
                f"A line is no JSON that can be read: {reason}. Received: file "
                f"{path}, line {number}. To leave out what cannot be read, use "
                "on_damage='skip'."
            )
        if table is not None:
            files.append((path, [(table.num_rows, table.nbytes)]))
            schema = _joined(schema, table.schema, columns, path)
    skipped = sum(map(len, damaged.values()))
    warn_of_skipped(skipped, "lines of JSON files")
    found = TableColumns(schema, columns)

    def read(path, _):
        lines = _lines(path)
        whole = [lines[n] for n in lines if n not in damaged[path]]
        with _named(path):
            table = _parsed(whole, [schema.field(n) for n in found.names])
        return found.arrays(table)

    return source_of_files(
        "json_lines", files, found.spec, read, found.decode, skipped
    )


def _lines(path):
    """The lines of a file that are not blank, by their numbers."""
    with tf.io.gfile.GFile(path, "rb") as file:
        lines = enumerate(file.read().split(b"\n"), 1)
    return {number: line for number, line in lines if line.strip()}


def _parsed(lines, fields=None):
    import pyarrow
    from pyarrow import json as pyarrow_json

    options = {"newlines_in_values": False}
    if fields is not None:
        options["explicit_schema"] = pyarrow.schema(fields)
        options["unexpected_field_behavior"] = "ignore"
    # A line must be within a block or two.
    longest = max(map(len, lines)) + 1
    return pyarrow_json.read_json(
        io.BytesIO(b"\n".join(lines)),
        read_options=pyarrow_json.ReadOptions(
            block_size=max(_BLOCK_BYTES, 2 * longest)
        ),
        parse_options=pyarrow_json.ParseOptions(**options),
    )


def _table_and_damaged(path, columns):
    """A table of readable lines, or None, and the reasons of other lines.

    Keys that are not in `columns` may be missing.
    """
    import pyarrow

    lines, damaged = _lines(path), {}
    # Of these, pyarrow reads some as it likes, and `null` ends the process.
    for number, line in lines.items():
        try:
            if not isinstance(json.loads(line), dict):
                damaged[number] = "it is not an object"
        except (ValueError, RecursionError) as error:
            damaged[number] = str(error)

    def table(cut=bytes):
        whole = [lines[number] for number in lines if number not in damaged]
        return _parsed(list(map(cut, whole))) if whole else None

    def cut(line):
        found = json.loads(line)
        return json.dumps({k: found[k] for k in columns if k in found}).encode()

    with contextlib.suppress(pyarrow.ArrowException):
        return table(), damaged
    # Lines that Python reads and pyarrow does not, such as half of a surrogate
    # pair or a key that comes twice.
    for number in lines.keys() - damaged.keys():
        try:
            _parsed([lines[number]])
        except pyarrow.ArrowException as error:
            damaged[number] = str(error)
    try:
        # Other keys may have values of any types.
        return table(bytes if columns is None else cut), damaged
    except pyarrow.ArrowException as error:
        raise ValueError(
            "The values of a key must be of one type: numbers, strings, "
            f"booleans or lists of numbers. Received: file {path}: {error}."
        ) from error


def _joined(schema, file_schema, columns, path):
    """The schema of a file joined with that of the files before."""
    import pyarrow

    before = [] if schema is None else schema.names
    fields = [
        # What looks like a time is a string, in whichever files.
        field.with_type(_without_times(field.type))
        for field in file_schema
        if columns is None or field.name in columns or field.name not in before
    ]
    file_schema = pyarrow.schema(fields)
    if schema is None:
        return file_schema
    try:
        return pyarrow.unify_schemas(
            [schema, file_schema], promote_options="permissive"
        )
    except pyarrow.ArrowException as error:
        raise ValueError(
            "The values of a key must be of one type in all files. Received: "
            f"{path}, unlike those before it: {error}."
        ) from error


def _without_times(kind):
    """A pyarrow type with strings for times, at any depth."""
    import pyarrow

    if pyarrow.types.is_timestamp(kind):
        return pyarrow.string()
    if table_columns.is_list(kind):
        return pyarrow.list_(_without_times(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct(
            [field.with_type(_without_times(field.type)) for field in kind]
        )
    return kind
