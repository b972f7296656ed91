"""JSON lines as a source: a file is a block."""

import io
import json
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.table_blocks import named
from tfscale.data.sources.table_blocks import same_schema
from tfscale.data.sources.table_blocks import table_blocks
from tfscale.data.sources.table_layout import TableLayout


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
            that are no JSON are left out, and counted in a warning.

    Returns:
        A source of dicts from column to scalar tensor, or to a vector where the
        column has lists of numbers. What is missing is 0, NaN, "" or an empty
        vector.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a line cannot be read.
        ValueError: If a column is missing, or holds neither numbers, strings
            nor lists of numbers.

    Example:

    >>> import os
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
    >>> with open(path, "w") as file:
    ...     _ = file.write('{"x": 1}' + chr(10) + '{"x": 2}' + chr(10))
    >>> json_lines(path).num_records
    2
    """
    from pyarrow import json as pyarrow_json  # an extra

    if on_damage not in ("raise", "skip"):
        raise ValueError(
            '`on_damage` must be "raise" or "skip". '
            f"Received: on_damage={on_damage!r}."
        )

    def parsed(path, lines):
        with named(path):
            return pyarrow_json.read_json(io.BytesIO(b"\n".join(lines)))

    blocks, schema, skipped = [], None, 0
    for path in file_source.match(pattern):
        lines, damaged = _lines(path)
        if damaged and on_damage == "raise":
            raise tf.errors.DataLossError(
                None,
                None,
                f"A line is no JSON. Received: file {path}, line {damaged[0]}."
                " To leave out what cannot be read, use on_damage='skip'.",
            )
        skipped += len(damaged)
        if lines:
            table = parsed(path, lines)
            blocks.append((path, 0, len(lines), table.nbytes))
            schema = same_schema(schema, table.schema, path)
    if skipped:
        warnings.warn(
            f"{skipped} damaged lines of JSON files are left out.", stacklevel=2
        )
    layout = TableLayout(schema, columns)
    return table_blocks(
        "json_lines",
        blocks,
        layout,
        lambda path, _: parsed(path, _lines(path)[0]),
        skipped,
    )


def _lines(path):
    """The lines of a file that are JSON, and the numbers of the others."""
    with tf.io.gfile.GFile(path, "rb") as file:
        contents = file.read()
    lines, damaged = [], []
    for number, line in enumerate(contents.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            whole = isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if whole:
            lines.append(line)
        else:
            damaged.append(number)
    return lines, damaged
