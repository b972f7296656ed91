"""JSON lines as a source: a file is a block."""

import io
import json
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.arrow_values import is_list
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.table_blocks import named
from tfscale.data.sources.table_blocks import table_blocks
from tfscale.data.sources.table_layout import TableLayout

_BLOCK_BYTES = 1 << 20  # parsed at a time


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
        pattern: String or path, or a list of them: paths or globs, also of a
            remote file system that `tf.io.gfile` knows.
        columns: List of strings, the keys to be read; by default all.
        on_damage: `"raise"`, with the file and the line, or `"skip"`: lines
            that cannot be read are left out, and counted in a warning.

    Returns:
        A source of dicts from column to scalar tensor, or to a vector where the
        column has lists. An object is a dict, a list of objects a dict of
        lists, and a list of lists an array, in which the lists of a record have
        one length. What is missing is 0, NaN, "" or an empty vector, also where
        a file never has the key. Dates are strings; numbers are int64, or
        float64 where one of the column is a fraction or beyond 64 bits.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a line cannot be read.
        ValueError: If a column is missing, or holds none of numbers, strings,
            and lists and objects of these, or not always the same.

    Example:

    >>> import os
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
    >>> with open(path, "w") as file:
    ...     _ = file.write('{"x": 1}' + chr(10) + '{"x": 2}' + chr(10))
    >>> json_lines(path).num_records
    2
    """
    if on_damage not in ("raise", "skip"):
        raise ValueError(
            '`on_damage` must be "raise" or "skip". '
            f"Received: on_damage={on_damage!r}."
        )
    blocks, damaged, schema = [], {}, None
    for path in file_source.match(pattern):
        lines = _lines(path)
        table, damaged[path] = _table_and_damaged(path, lines)
        if damaged[path] and on_damage == "raise":
            number, reason = min(damaged[path].items())
            raise tf.errors.DataLossError(
                None,
                None,
                f"A line is no JSON that can be read: {reason}. Received: file "
                f"{path}, line {number}. To leave out what cannot be read, use "
                "on_damage='skip'.",
            )
        if table is not None:
            blocks.append((path, 0, table.num_rows, table.nbytes))
            schema = _joined(schema, table.schema, columns, path)
    skipped = sum(map(len, damaged.values()))
    if skipped:
        warnings.warn(
            f"{skipped} damaged lines of JSON files are left out.", stacklevel=2
        )
    layout = TableLayout(schema, columns)

    def read(path, _):
        lines = _lines(path)
        whole = [lines[n] for n in lines if n not in damaged[path]]
        with named(path):
            return _parsed(whole, [schema.field(n) for n in layout.names])

    return table_blocks("json_lines", blocks, layout, read, skipped)


def _lines(path):
    """The lines of a file that are not blank, by their numbers."""
    with tf.io.gfile.GFile(path, "rb") as file:
        lines = enumerate(file.read().split(b"\n"), 1)
    return {number: line for number, line in lines if line.strip()}


def _parsed(lines, fields=None):
    """A table of lines; of given columns, or of all that there are."""
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


def _table_and_damaged(path, lines):
    """What can be read, or None, and the other lines' numbers and reasons."""
    import pyarrow

    damaged = {}
    for number, line in lines.items():
        try:
            if not isinstance(json.loads(line), dict):
                damaged[number] = "it is no object"
        except (ValueError, RecursionError) as error:
            damaged[number] = str(error)

    def table():
        whole = [lines[number] for number in lines if number not in damaged]
        return _parsed(whole) if whole else None

    try:
        return table(), damaged
    except pyarrow.ArrowException:
        # Lines that Python reads and pyarrow does not, such as half of a
        # surrogate pair or a key that comes twice.
        for number in lines.keys() - damaged.keys():
            try:
                _parsed([lines[number]])
            except pyarrow.ArrowException as error:
                damaged[number] = str(error)
    try:
        return table(), damaged
    except pyarrow.ArrowException as error:
        raise ValueError(
            "The values of a key must be of one type: numbers, strings, "
            f"booleans or lists of numbers. Received: file {path}: {error}."
        ) from error


def _joined(schema, own, columns, path):
    """The schema of a file and of those before it, as far as it is read."""
    import pyarrow

    before = [] if schema is None else schema.names
    fields = [
        # What looks like a time is a string, in whichever files.
        field.with_type(_without_times(field.type))
        for field in own
        if columns is None or field.name in columns or field.name not in before
    ]
    own = pyarrow.schema(fields)
    if schema is None:
        return own
    try:
        return pyarrow.unify_schemas(
            [schema, own], promote_options="permissive"
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
    if is_list(kind):
        return pyarrow.list_(_without_times(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct(
            [field.with_type(_without_times(field.type)) for field in kind]
        )
    return kind
