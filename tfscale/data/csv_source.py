"""CSV files as a source."""

import numpy as np
import tensorflow as tf

from tfscale.data import file_source
from tfscale.data.source import BlockSource

_QUOTE, _NEWLINE = ord('"'), ord("\n")


def csv(pattern, *, dtypes, label=None, has_header=True, delimiter=","):
    r"""Records are the lines of CSV files.

    A file is read as a whole, so it must fit the memory; use more and smaller
    files, or TFRecord, for what does not.

    Args:
        pattern: String or list of strings: paths or globs.
        dtypes: Dict from column name to dtype: `"float32"`, `"float64"`,
            `"int32"`, `"int64"` or `"string"`. An empty field is 0 or "".
        label: String, the column to be predicted, or None.
        has_header: Whether the first line of each file names the columns;
            without, `dtypes` does, in order.
        delimiter: String of one character.

    Returns:
        A source of dicts from column name to scalar tensor, or with `label` of
        `(dict, label)`. Columns that `dtypes` leaves out are not read.

    Raises:
        FileNotFoundError: If no file matches.
        ValueError: If a column is missing, or files have different columns.

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
    texts = [_Text(path, has_header) for path in file_source.match(pattern)]
    columns = list(dtypes)
    if has_header:
        headers = {text.header.decode() for text in texts}
        if len(headers) > 1:
            raise ValueError(
                "CSV files must have the same columns. Received: headers "
                f"{sorted(headers)}."
            )
        columns = _fields(headers.pop(), delimiter)
    missing = sorted({*dtypes, *([label] if label else [])} - set(columns))
    if missing or (label is not None and label not in dtypes):
        raise ValueError(
            "`dtypes` and `label` must name columns of the files, and the "
            f"label needs a dtype. Received: dtypes={dtypes}, label={label!r}; "
            f"the columns are {columns}."
        )
    decode = _decoder(columns, dtypes, label, delimiter)
    return _source(texts, decode)


class _Text:
    """Where the records of a file begin; quoted ones may hold newlines."""

    def __init__(self, path, has_header):
        with tf.io.gfile.GFile(path, "rb") as file:
            data = np.frombuffer(file.read(), np.uint8)
        inside = np.cumsum(data == _QUOTE) % 2 == 1
        ends = np.flatnonzero((data == _NEWLINE) & ~inside)
        if data.size and (not ends.size or ends[-1] != data.size - 1):
            ends = np.append(ends, data.size)
        begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        filled = ends[: begins.size] > begins[: ends.size]
        begins, ends = begins[: ends.size][filled], ends[filled]
        self.path = path
        self.header = b""
        if has_header and ends.size:
            self.header = data[begins[0] : ends[0]].tobytes().rstrip(b"\r")
            begins, ends = begins[1:], ends[1:]
        self.begins = begins
        self.lengths = (ends - begins).astype(np.int64)


def _fields(header, delimiter):
    return [name.strip().strip('"') for name in header.split(delimiter)]


def _decoder(columns, dtypes, label, delimiter):
    defaults = [
        tf.constant(
            ["" if dtypes[name] == "string" else 0], tf.as_dtype(dtypes[name])
        )
        for name in columns
        if name in dtypes
    ]
    selected = [at for at, name in enumerate(columns) if name in dtypes]
    names = [columns[at] for at in selected]

    def decode(line):
        line = tf.strings.regex_replace(line, "\r$", "")
        values = tf.io.decode_csv(
            line, defaults, field_delim=delimiter, select_cols=selected
        )
        record = dict(zip(names, values))
        if label is None:
            return record
        target = record.pop(label)
        return record, target

    return decode


def _source(texts, decode):
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
        return tf.data.Dataset.from_tensor_slices(lines)

    def place(record):
        file = tf.searchsorted(row_ends, record[tf.newaxis], side="right")
        return tf.gather(paths, file[0]), tf.gather(begins, record)

    def split(num_workers, worker):
        shares = [texts[w::num_workers] for w in range(num_workers)]
        sizes = [sum(t.begins.size for t in share) for share in shares]
        return _source(shares[worker], decode), sizes

    table = [(text.begins.size, int(text.lengths.sum())) for text in texts]
    return BlockSource(
        kind="csv",
        blocks=np.array(table, np.int64).reshape(-1, 2),
        read_block=read_block,
        place=place,
        decode=decode,
        split=split,
    )
