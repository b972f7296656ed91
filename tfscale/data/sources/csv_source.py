"""CSV files as a source."""

import csv as csv_reader
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import file_source
from tfscale.data.sources import table_source
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import unreadable
from tfscale.data.sources.source import warn_of_skipped

_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.string)
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_MARK = b"\xef\xbb\xbf"  # at the beginning of UTF-8 of spreadsheets


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
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        dtypes: Dict from column name to dtype: `"float32"`, `"float64"`,
            `"int32"`, `"int64"`, `"bool"` (true, false, 1 or 0, in any case
            of letters) or `"string"`. An empty field is 0, False or "".
        label: String, the column to be predicted, or None.
        has_header: Whether the first line of each file names the columns;
            without, `dtypes` does, in order.
        delimiter: String of one ASCII character.
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
        ValueError: If a column is missing or there twice, or files have
            different columns, or a dtype is not one of those above.

    Example:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> tf.io.write_file(folder + "/a.csv", "x,y\n1,2\n3,4\n")
    >>> source = csv(folder + "/*.csv", dtypes={"x": "int32"})
    >>> source.num_records
    2
    """
    check_on_damage(on_damage)
    if len(delimiter.encode()) != 1:
        raise ValueError(
            "`delimiter` must be one ASCII character. Received: "
            f"delimiter={delimiter!r}."
        )
    texts = [
        _CsvFile(path, has_header, delimiter)
        for path in file_source.match(pattern)
    ]
    texts = [text for text in texts if text.header or text.begins.size]
    dtypes = {name: _dtype(name, dtype) for name, dtype in dtypes.items()}
    columns = list(dtypes)
    if has_header and texts:
        columns = _columns(texts, delimiter)
    wrong = any(columns.count(name) != 1 for name in dtypes)
    if wrong or not dtypes or (label is not None and label not in dtypes):
        raise ValueError(
            "`dtypes` and `label` must name columns of the files, at least "
            "one, each of which is there once, and the label needs a dtype. "
            "Received: dtypes="
            f"{ {name: dtype.name for name, dtype in dtypes.items()} }, "
            f"label={label!r}; the columns are {columns}."
        )
    skipped = sum(
        text.check(columns, dtypes, delimiter, on_damage == "raise")
        for text in texts
    )
    warn_of_skipped(skipped, f"lines of {len(texts)} CSV files")
    names = [name for name in columns if name in dtypes]
    selected = [columns.index(name) for name in names]
    defaults = [_default(dtypes[name]) for name in names]
    found = {text.path: text for text in texts if text.begins.size}

    def read(path, _):
        text, contents = found[path], tf.io.read_file(path)
        # Not `tf.strings.length`: it counts up to 2 GiB.
        if (size := tf.io.gfile.stat(path).length) != text.size:
            raise data_loss(
                "A file must not change after its source was created. "
                f"Received: file {path} with {size} bytes where there were "
                f"{text.size}."
            )
        fields = tf.io.decode_csv(
            text.lines(contents),
            defaults,
            field_delim=delimiter,
            select_cols=selected,
        )
        values = {
            name: _is_one_of(field, _TRUE) if dtypes[name] == tf.bool else field
            for name, field in zip(names, fields, strict=True)
        }
        return [value.numpy() for value in tf.nest.flatten(record_of(values))]

    def record_of(values):
        return values if label is None else (values, values.pop(label))

    return table_source.source_of_files(
        "csv",
        [
            (path, [(text.begins.size, int(text.lengths.sum()))])
            for path, text in found.items()
        ],
        record_of({name: tf.TensorSpec([], dtypes[name]) for name in names}),
        read,
        skipped=skipped,
    )


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
    headers = {tuple(text.columns(delimiter)) for text in texts}
    if len(headers) > 1:
        raise ValueError(
            "CSV files must have the same columns. Received: headers "
            f"{sorted(map(list, headers))}."
        )
    return list(headers.pop())


class _CsvFile:
    """The lines of one file.

    Attributes:
        path: String.
        size: Integer, bytes.
        header: String, the first line if it names the columns, else "".
        begins: int64 array, where each other line begins.
        lengths: int64 array, their bytes without the end of the line.
    """

    def __init__(self, path, has_header, delimiter):
        with tf.io.gfile.GFile(path, "rb") as file:
            data = np.frombuffer(file.read(), np.uint8)
        begin = len(_MARK) if data[:3].tobytes() == _MARK else 0
        ends = _ends_of_records(data, begin, ord(delimiter))
        if data.size and (not ends.size or ends[-1] != data.size - 1):
            ends = np.append(ends, data.size)
        # Between two ends; quoted fields may hold newlines.
        begins = np.concatenate([[begin], ends[:-1] + 1]).astype(np.int64)
        begins = begins[: ends.size]
        returns = (ends > begins) & (data[ends - 1] == _RETURN)
        ends = ends - returns  # lines end in CR LF as well
        filled = ends > begins
        begins, ends = begins[filled], ends[filled]
        self.path, self.size = path, data.size
        self.header = ""
        if has_header and ends.size:
            header = data[begins[0] : ends[0]].tobytes()
            self.header = header.decode("utf-8", errors="replace")
            begins, ends = begins[1:], ends[1:]
        self.begins = begins
        self.lengths = (ends - begins).astype(np.int64)

    def lines(self, contents):
        """The lines in the contents of the file, as a vector of strings."""
        return tf.strings.substr(contents, self.begins, self.lengths)

    def columns(self, delimiter):
        """Names of the columns, as the header has them."""
        try:
            if "\0" in self.header:
                raise csv_reader.Error("it is no text")
            (names,) = csv_reader.reader([self.header], delimiter=delimiter)
        except csv_reader.Error as error:
            raise data_loss(
                "A CSV file cannot be read: it is damaged, or of another "
                f"format: {error}. Received: file {self.path}, line 1: "
                f"{self.header[:80]!r}."
            ) from error
        return [name.strip() for name in names]

    def check(self, columns, dtypes, delimiter, raises):
        """Leaves out lines that cannot be read, or `raises`; how many."""
        with tf.io.gfile.GFile(self.path, "rb") as file:
            contents = file.read()
        lines = self.lines(contents)
        # All fields, so that one too few or too many is found.
        defaults = [_default(dtypes.get(name, tf.string)) for name in columns]

        def read(first, last):
            fields = tf.io.decode_csv(
                lines[first:last], defaults, field_delim=delimiter
            )
            for name, values in zip(columns, fields, strict=True):
                if dtypes.get(name) == tf.bool:
                    _check_booleans(values)

        failures = unreadable(
            len(self.begins), read, tf.errors.InvalidArgumentError
        )
        failures = list(itertools.islice(failures, 1 if raises else None))
        if failures and raises:
            number, error = failures[0]
            begin, reason = int(self.begins[number]), _reason(error)
            line = contents.count(b"\n", 0, begin) + 1
            raise data_loss(
                f"A line of a CSV file cannot be read: {reason}. Received: "
                f"file {self.path}, offset {begin}, line {line}: "
                f"{lines[number].numpy()[:80]!r}. To leave out what cannot be "
                "read, use on_damage='skip'."
            )
        damaged = [number for number, _ in failures]
        self.begins = np.delete(self.begins, damaged)
        self.lengths = np.delete(self.lengths, damaged)
        return len(damaged)


def _ends_of_records(data, begin, delimiter):
    """The newlines of a file's bytes that are not within quoted fields.

    The first field begins at `begin`. A quote where no field begins or ends
    damages the line in which its field begins; the next line is read as if it
    were the first.
    """
    newlines = np.flatnonzero(data == _NEWLINE)
    quotes = np.flatnonzero(data == _QUOTE)
    before = np.searchsorted(quotes, newlines)  # quotes before each newline
    around = [delimiter, _QUOTE, _NEWLINE, _RETURN]
    may_open = np.isin(data[quotes - 1], around) | (quotes == begin)
    after = np.minimum(quotes + 1, data.size - 1)
    may_close = np.isin(data[after], around)
    # The end of the file is as a quote: it may not close a field.
    may_open, may_close = np.append(may_open, True), np.append(may_close, False)
    is_odd = np.arange(may_open.size) % 2 == 1
    # By whether the first quote, which opens a field, is an odd one.
    wrong = [
        np.flatnonzero(~np.where(is_odd == odd, may_open, may_close))
        for odd in (False, True)
    ]
    damaged, firsts = [], [0]  # ends of damaged lines, and quotes before them
    while True:
        first = firsts[-1]
        found = wrong[first % 2]
        at = np.searchsorted(found, first)
        if at == found.size:
            break
        opened = found[at] - (found[at] - first) % 2
        while opened > first and quotes[opened] == quotes[opened - 1] + 1:
            opened -= 2  # two quotes within a field are one
        line = np.searchsorted(newlines, quotes[opened])
        if line == newlines.size:
            break
        damaged.append(line)
        firsts.append(before[line])
    lengths = np.diff([0, *(line + 1 for line in damaged), newlines.size])
    outside = (before - np.repeat(firsts, lengths)) % 2 == 0
    outside[damaged] = True
    return newlines[outside]


def _default(dtype):
    """The value of an empty field, for `tf.io.decode_csv`."""
    if dtype in (tf.string, tf.bool):  # which it reads as a string
        return tf.constant([""])
    return tf.constant([0], dtype)


def _check_booleans(fields):
    known = _is_one_of(fields, _TRUE + _FALSE)
    unknown = tf.boolean_mask(fields, ~known).numpy()
    if unknown.size:
        raise tf.errors.InvalidArgumentError(
            None, None, f"Field is not a valid bool: {unknown[0].decode()}"
        )


def _is_one_of(fields, words):
    lower = tf.strings.lower(tf.strings.strip(fields))
    return tf.reduce_any(tf.equal(lower[:, tf.newaxis], words), axis=1)


def _reason(error):
    """The message of TensorFlow without the name of its operation."""
    reason = error.message.split("}}")[-1].split(" [Op:")[0].strip()
    return reason.removesuffix(" in record 0")
