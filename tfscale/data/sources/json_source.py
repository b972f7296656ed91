"""Files of lines of JSON as a source."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from tfscale.data.sources import arrow_columns
from tfscale.data.sources import file_source
from tfscale.data.sources import table_files
from tfscale.data.sources import text_blocks
from tfscale.data.sources.arrow_columns import ArrowColumns
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import warn_of_skipped


def json_lines(
    pattern: file_source.Pattern,
    *,
    columns: Sequence[str] | None = None,
    on_damage: str = "raise",
) -> BlockSource:
    """Records are the lines of JSON files; needs pyarrow (`tfscale[tables]`).

    A file may be larger than the memory: it is read in blocks of a MiB. Every
    line is looked at once, here: one that cannot be read is found before the
    first step.

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
    >>> import tensorflow as tf
    >>> tf.io.write_file(path, '{"x": 1}' + chr(10) + '{"x": 2}' + chr(10))
    >>> json_lines(path).num_records
    2
    """
    check_on_damage(on_damage)
    files, schema = [], None
    for path in file_source.match(pattern):

        def look(contents, path=path):
            nonlocal schema
            lines = text_blocks.lines_of(contents)
            table, damaged = _table_and_damaged(path, lines, columns)
            if table is None:
                return text_blocks.Looked(0, lines, damaged)
            schema = _joined(schema, table.schema, columns, path)
            return text_blocks.Looked(table.num_rows, lines, damaged)

        blocks = text_blocks.blocks_of(path)
        files.append(text_blocks.scanned("JSON", path, blocks, look, on_damage))
    skipped = sum(file.num_damaged for file in files)
    warn_of_skipped(skipped, "lines of JSON files")
    found = ArrowColumns(schema, columns)

    def read(path, block):
        fields = [schema.field(name) for name in found.names]
        return found.read(_parsed(text_blocks.read(path, block), fields))

    return table_files.source_of("json_lines", files, found.rows, read)


def _parsed(contents: bytes, fields: Sequence[Any] | None = None) -> Any:
    import pyarrow
    from pyarrow import json as pyarrow_json

    options: dict[str, Any] = {"newlines_in_values": False}
    if fields is not None:
        options["explicit_schema"] = pyarrow.schema(fields)
        options["unexpected_field_behavior"] = "ignore"
    return pyarrow_json.read_json(
        pyarrow.BufferReader(contents),
        read_options=pyarrow_json.ReadOptions(
            use_threads=False, block_size=len(contents) + 1
        ),
        parse_options=pyarrow_json.ParseOptions(**options),
    )


def _table_and_damaged(
    path: str, lines: Sequence[bytes], columns: Sequence[str] | None
) -> tuple[Any, dict[int, str]]:
    """A table of readable lines, or None, and the reasons of other lines.

    Keys that are not in `columns` may be missing.
    """
    import pyarrow

    damaged: dict[int, str] = {}
    filled = [number for number, line in enumerate(lines) if line.strip()]
    # Others may be no object, which pyarrow may take for a missing one: a block
    # of `null` ends the process.
    if all(lines[number].lstrip().startswith(b"{") for number in filled):
        with contextlib.suppress(UnicodeDecodeError, pyarrow.ArrowException):
            contents = b"".join(lines)
            contents.decode()
            table = _parsed(contents) if filled else None
            if table is None or table.num_rows == len(filled):
                return table, damaged
    for number in filled:
        if (reason := _damage(lines[number])) is not None:
            damaged[number] = reason
    whole = [lines[number] for number in filled if number not in damaged]
    if not whole:
        return None, damaged
    if columns is not None:  # other keys may have values of any types

        def cut(line):
            found = json.loads(line)
            return json.dumps({k: found[k] for k in columns if k in found})

        whole = [cut(line).encode() + b"\n" for line in whole]
    try:
        return _parsed(b"".join(whole)), damaged
    except pyarrow.ArrowException as error:
        raise ValueError(
            "The values of a key must be of one type: numbers, strings, "
            f"booleans or lists of numbers. Received: file {path}: {error}."
        ) from error


def _damage(line: bytes) -> str | None:
    """Why a line is no object that Python and pyarrow read, or None.

    Pyarrow refuses half of a surrogate pair, and a key that comes twice.
    """
    import pyarrow

    try:
        if not isinstance(json.loads(line), dict):
            return "it is not an object"
        _parsed(line)
    except (ValueError, RecursionError, pyarrow.ArrowException) as error:
        return str(error)
    return None


def _joined(schema, file_schema, columns, path):
    """The schema of a file joined with that of the files before."""
    import pyarrow

    before = [] if schema is None else schema.names
    fields = [
        # A value that looks like a time is a string, in all files.
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
    if arrow_columns.is_list(kind):
        return pyarrow.list_(_without_times(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct(
            [field.with_type(_without_times(field.type)) for field in kind]
        )
    return kind
