"""CSV files as a source."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import csv_file
from tfscale.data.sources import file_source
from tfscale.data.sources.csv_file import CsvFile
from tfscale.data.sources.source import BlockSource

_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.string)


def csv(
    pattern: file_source.Pattern,
    *,
    dtypes: Mapping[str, Any],
    label: str | None = None,
    has_header: bool = True,
    delimiter: str = ",",
    on_damage: str = "raise",
) -> BlockSource:
    r"""Records are the lines of CSV files.

    A file is read as a whole, so it must fit the memory; use more and smaller
    files, or TFRecord, for what does not. Every line is looked at once, here:
    one that cannot be read is found before the first step.

    Args:
        pattern: String or path, or a list of them: paths or globs, also of a
            remote file system that `tf.io.gfile` knows.
        dtypes: Dict from column name to dtype: `"float32"`, `"float64"`,
            `"int32"`, `"int64"`, `"bool"` (true, false, 1 or 0, in any case
            of letters) or `"string"`. An empty field is 0, False or "".
        label: String, the column to be predicted, or None.
        has_header: Whether the first line of each file names the columns;
            without, `dtypes` does, in order.
        delimiter: String of one character.
        on_damage: `"raise"`, with the file and the offset, when a line has too
            few or too many fields, or one that is not of the column's dtype, or
            `"skip"`: such lines are left out, and counted in a warning.

    Returns:
        A source of dicts from column name to scalar tensor, or with `label` of
        `(dict, label)`. Columns that `dtypes` leaves out are not read.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a line cannot be read, or a file is of
            another format.
        ValueError: If a column is missing, or files have different columns, or
            a dtype is not one of those above.

    Example:

    >>> import os
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with open(os.path.join(folder, "a.csv"), "w") as file:
    ...     _ = file.write("x,y\n1,2\n3,4\n")
    >>> source = csv(folder + "/*.csv", dtypes={"x": "int32"})
    >>> source.num_records
    2
    """
    if len(delimiter) != 1 or on_damage not in ("raise", "skip"):
        raise ValueError(
            '`delimiter` must be one character, and `on_damage` be "raise" or '
            f'"skip". Received: delimiter={delimiter!r}, '
            f"on_damage={on_damage!r}."
        )
    texts = [CsvFile(path, has_header) for path in file_source.match(pattern)]
    texts = [text for text in texts if text.header or text.begins.size]
    dtypes = {name: _dtype(name, dtype) for name, dtype in dtypes.items()}
    columns = list(dtypes)
    if has_header and texts:
        columns = _columns(texts, delimiter)
    missing = sorted({*dtypes, *([label] if label else [])} - set(columns))
    if missing or not dtypes or (label is not None and label not in dtypes):
        raise ValueError(
            "`dtypes` and `label` must name columns of the files, at least "
            "one, and the label needs a dtype. Received: dtypes="
            f"{ {name: dtype.name for name, dtype in dtypes.items()} }, "
            f"label={label!r}; the columns are {columns}."
        )
    skipped = sum(
        text.check(columns, dtypes, delimiter, on_damage) for text in texts
    )
    if skipped:
        warnings.warn(
            f"{skipped} damaged lines of {len(texts)} CSV files are left out.",
            stacklevel=2,
        )
    decode = _decoder(columns, dtypes, label, delimiter)
    return _source(texts, decode, skipped)


def _dtype(name, dtype):
    try:
        known = tf.string if dtype is str else tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known not in _DTYPES:
        raise ValueError(
            f"A column's dtype must be one of {[d.name for d in _DTYPES]}. "
            f"Received: {dtype!r} for {name!r}. Read it as one of these, and "
            "cast it in `parse`."
        )
    return known


def _columns(texts, delimiter):
    """Names of the columns, which all files must have in common."""
    headers = {tuple(text.columns(delimiter)) for text in texts}
    if len(headers) > 1:
        raise ValueError(
            "CSV files must have the same columns. Received: headers "
            f"{sorted(map(list, headers))}."
        )
    return list(headers.pop())


def _decoder(columns, dtypes, label, delimiter):
    defaults = [
        csv_file.default(dtypes[name]) for name in columns if name in dtypes
    ]
    selected = [at for at, name in enumerate(columns) if name in dtypes]
    names = [columns[at] for at in selected]

    def decode(line):
        values = tf.io.decode_csv(
            line, defaults, field_delim=delimiter, select_cols=selected
        )
        record = {
            name: csv_file.booleans(value) if dtypes[name] == tf.bool else value
            for name, value in zip(names, values)
        }
        if label is None:
            return record
        target = record.pop(label)
        return record, target

    return decode


def _source(texts, decode, skipped):
    texts = [text for text in texts if text.begins.size]
    sizes = [text.begins.size for text in texts]
    ends = np.cumsum(sizes, dtype=np.int64)
    paths = tf.constant([text.path for text in texts], tf.string)
    row_begins = tf.constant(ends - np.array(sizes, np.int64), tf.int64)
    row_ends = tf.constant(ends, tf.int64)
    empty = np.zeros([0], np.int64)
    begins = tf.constant(
        np.concatenate([empty, *(text.begins for text in texts)])
    )
    lengths = tf.constant(
        np.concatenate([empty, *(text.lengths for text in texts)])
    )

    def read_block(block):
        last = tf.gather(row_ends, block)
        first = tf.gather(row_begins, block)
        contents = tf.io.read_file(tf.gather(paths, block))
        lines = tf.strings.substr(
            contents,
            begins[first:last],
            lengths[first:last],
        )
        return tf.data.Dataset.from_tensors(lines)

    def place(record):
        file = tf.searchsorted(row_ends, record[tf.newaxis], side="right")
        return tf.gather(paths, file[0]), tf.gather(begins, record)

    def split(num_workers, worker):
        shares = [texts[w::num_workers] for w in range(num_workers)]
        sizes = [sum(t.begins.size for t in share) for share in shares]
        return _source(shares[worker], decode, skipped), sizes

    table = [(text.begins.size, int(text.lengths.sum())) for text in texts]
    return BlockSource(
        kind="csv",
        blocks=np.array(table, np.int64).reshape(-1, 2),
        read_block=read_block,
        place=place,
        decode=decode,
        split=split,
        num_skipped=skipped,
    )
