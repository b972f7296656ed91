"""Parquet and JSON lines as sources: blocks of rows, read through pyarrow.

A row travels through the chain as bytes, as a record of any other file does,
and becomes columns in `decode`:

    numbers of all columns | lengths of the strings | strings
"""

import io
import json
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources.source import BlockSource


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
        A source of dicts from column to scalar tensor. What is missing is 0,
        NaN or "".

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file cannot be read.
        ValueError: If a column is missing, or holds no numbers or strings.

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
        with _named(path), opened(path) as file:
            about = [
                file.metadata.row_group(group)
                for group in range(file.metadata.num_row_groups)
            ]
            own = file.schema_arrow
        blocks += [
            (path, number, group.num_rows, group.total_byte_size)
            for number, group in enumerate(about)
        ]
        schema = _same(schema, own, path)
    layout = _Layout(schema, columns)

    def read(path, group):
        with _named(path), opened(path) as file:
            return file.read_row_group(group, columns=layout.names)

    return _source("parquet", blocks, layout, read, 0)


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
        A source of dicts from column to scalar tensor. What is missing is 0,
        NaN or "".

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a line cannot be read.
        ValueError: If a column is missing, or holds no numbers or strings.

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
        with _named(path):
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
            schema = _same(schema, table.schema, path)
    if skipped:
        warnings.warn(
            f"{skipped} damaged lines of JSON files are left out.", stacklevel=2
        )
    layout = _Layout(schema, columns)
    return _source(
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


class _named:
    """What pyarrow cannot read is damaged, and is named."""

    def __init__(self, path):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        import pyarrow

        if isinstance(error, pyarrow.ArrowException | OSError):
            raise tf.errors.DataLossError(
                None,
                None,
                "A file cannot be read: it is damaged, or of another format. "
                f"Received: file {self._path}: {error}",
            ) from error


def _same(schema, other, path):
    if schema is not None and not schema.equals(other):
        raise ValueError(
            "Files must have the same columns. Received: "
            f"{path} with {dict(zip(other.names, map(str, other.types)))} "
            f"after {dict(zip(schema.names, map(str, schema.types)))}."
        )
    return other


class _Layout:
    """How a row is written as bytes, and read from them."""

    def __init__(self, schema, columns):
        import pyarrow

        fields = {} if schema is None else dict(zip(schema.names, schema.types))
        self.names = list(fields if columns is None else columns)
        missing = sorted(set(self.names) - set(fields))
        if missing or not self.names:
            raise ValueError(
                "`columns` must name columns of the files, at least one. "
                f"Received: {self.names}; there are {sorted(fields)}."
            )
        self.numbers, self.strings = {}, []
        for name in self.names:
            kind = fields[name]
            if pyarrow.types.is_boolean(kind):
                self.numbers[name] = np.dtype(np.bool_)
            elif pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(
                kind
            ):
                self.numbers[name] = np.dtype(kind.to_pandas_dtype())
            elif (
                pyarrow.types.is_string(kind)
                or pyarrow.types.is_large_string(kind)
                or pyarrow.types.is_binary(kind)
            ):
                self.strings.append(name)
            else:
                raise ValueError(
                    "A column must hold numbers, booleans or strings. "
                    f"Received: {name!r} of {kind}. Leave it out of `columns`."
                )

    def rows(self, table):
        """The rows of a pyarrow table as bytes."""
        parts = []
        for name, dtype in self.numbers.items():
            column = table.column(name).combine_chunks()
            if dtype.kind != "f":
                column = column.fill_null(False if dtype.kind == "b" else 0)
            values = column.to_numpy(zero_copy_only=False).astype(dtype)
            parts.append(values.view(np.uint8).reshape(len(values), -1))
        strings = [
            [
                value.encode() if isinstance(value, str) else value or b""
                for value in table.column(name).to_pylist()
            ]
            for name in self.strings
        ]
        for values in strings:
            sizes = np.array([len(value) for value in values], np.int32)
            parts.append(sizes.view(np.uint8).reshape(len(sizes), -1))
        if not table.num_rows:
            return []
        fixed = np.concatenate(parts, axis=1)
        width, flat = fixed.shape[1], fixed.tobytes()
        heads = [flat[at : at + width] for at in range(0, len(flat), width)]
        return [b"".join(row) for row in zip(heads, *strings, strict=True)]

    def decode(self, row):
        """Columns of a row; of single records, or of batches of them."""
        record, at = {}, 0
        for name, dtype in self.numbers.items():
            part = tf.strings.substr(row, at, dtype.itemsize)
            record[name] = tf.io.decode_raw(part, tf.as_dtype(dtype))[0]
            at += dtype.itemsize
        sizes = []
        for _ in self.strings:
            part = tf.strings.substr(row, at, 4)
            sizes.append(tf.io.decode_raw(part, tf.int32)[0])
            at += 4
        begin = tf.constant(at)
        for name, size in zip(self.strings, sizes, strict=True):
            record[name] = tf.strings.substr(row, begin, size)
            begin = begin + size
        return {name: record[name] for name in self.names}


def _source(
    kind: str,
    blocks: list[tuple[str, int, int, int]],
    layout: _Layout,
    read: Callable[[str, int], Any],
    skipped: int,
) -> BlockSource:
    blocks = [block for block in blocks if block[2]]
    ends = tf.constant(np.cumsum([block[2] for block in blocks]), tf.int64)
    paths = tf.constant([block[0] for block in blocks], tf.string)

    def fetch(number):
        path, group, *_ = blocks[int(number)]
        return np.array(layout.rows(read(path, group)), object)

    def read_block(number):
        rows = tf.numpy_function(fetch, [number], tf.string, stateful=False)
        # Outside of a graph one string comes without a dimension.
        return tf.data.Dataset.from_tensors(tf.reshape(rows, [-1]))

    def place(record):
        block = tf.searchsorted(ends, record[tf.newaxis], side="right")[0]
        return tf.gather(paths, block), record

    def split(num_workers, worker):
        names = sorted({block[0] for block in blocks})
        shares = [
            [b for b in blocks if b[0] in names[w::num_workers]]
            for w in range(num_workers)
        ]
        sizes = [sum(block[2] for block in share) for share in shares]
        return _source(kind, shares[worker], layout, read, skipped), sizes

    table = np.array([block[2:] for block in blocks], np.int64)
    return BlockSource(
        kind=kind,
        blocks=table.reshape(-1, 2),
        read_block=read_block,
        place=place,
        decode=layout.decode,
        split=split,
        num_skipped=skipped,
    )
