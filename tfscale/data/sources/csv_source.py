"""CSV files as a source."""

import contextlib
import csv as csv_reader
import itertools
import re
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.data.sources import arrow_columns
from tfscale.data.sources import file_source
from tfscale.data.sources import table_files
from tfscale.data.sources import text_blocks
from tfscale.data.sources.row_format import Leaf
from tfscale.data.sources.row_format import RowFormat
from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import check_on_damage
from tfscale.data.sources.source import data_loss
from tfscale.data.sources.source import unreadable
from tfscale.data.sources.source import warn_of_skipped

_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.string)
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_MARK = b"\xef\xbb\xbf"  # at the beginning of UTF-8 of spreadsheets
_LONGEST = 16 << 20  # bytes of a line that quotes go on with


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

    A file may be larger than the memory: it is read in blocks of a MiB. Every
    line is looked at once, here: one that cannot be read is found before the
    first step. Needs pyarrow (`tfscale[tables]`).

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        dtypes: Dict from column name to dtype: `"float32"`, `"float64"`,
            `"int32"`, `"int64"`, `"bool"` (true, false, 1 or 0, in any case
            of letters) or `"string"`. An empty field is 0, False or "". A
            field in quotes may hold newlines, up to 16 MiB.
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
    lines = _Lines(delimiter)
    heads = [
        _head_of(path, lines, has_header) for path in file_source.match(pattern)
    ]
    heads = [head for head in heads if head.names or not has_header]
    dtypes = {name: _dtype(name, dtype) for name, dtype in dtypes.items()}
    columns = list(dtypes)
    if has_header and heads:
        columns = _columns(heads, delimiter)
    wrong = any(columns.count(name) != 1 for name in dtypes)
    if wrong or not dtypes or (label is not None and label not in dtypes):
        raise ValueError(
            "`dtypes` must name one or more columns of the files that are "
            "there once, and `label` one of `dtypes`. Received: dtypes="
            f"{ {name: dtype.name for name, dtype in dtypes.items()} }, "
            f"label={label!r}; the columns are {columns}."
        )
    parser = _Parser(columns, dtypes, lines, delimiter)

    def look(contents):
        return parser.look(contents, first_only=on_damage == "raise")

    files = [
        text_blocks.scanned(
            "CSV",
            head.path,
            text_blocks.blocks_of(head.path, lines.end, head.size, head.line),
            look,
            on_damage,
        )
        for head in heads
    ]
    skipped = sum(file.num_damaged for file in files)
    warn_of_skipped(skipped, f"lines of {len(files)} CSV files")

    def read(path, block):
        return parser.read(text_blocks.read(path, block, lines.all))

    def record(values):
        return values if label is None else (values, values.pop(label))

    return table_files.source_of("csv", files, parser.rows, read, record)


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


class _Head(NamedTuple):
    """The bytes before the rows of a file."""

    path: str
    names: str  # the line that names the columns, or ""
    size: int  # bytes
    line: int  # the number of the line after it


def _head_of(path, lines, has_header):
    first = next(text_blocks.blocks_of(path, lines.end), None)
    contents = first.contents if first else b""
    size = len(_MARK) if contents.startswith(_MARK) else 0
    line = 1
    for names, _ in lines(contents[size:]) if has_header else ():
        size += len(names)
        line += names.count(b"\n")
        if names.strip():
            text = names.rstrip(b"\r\n").decode("utf-8", errors="replace")
            return _Head(path, text, size, line)
    return _Head(path, "", size, line)


def _columns(heads, delimiter):
    """Names of the columns, as the headers have them."""
    headers = {}
    for head in heads:
        try:
            if "\0" in head.names:
                raise csv_reader.Error("it is no text")
            (names,) = csv_reader.reader([head.names], delimiter=delimiter)
        except csv_reader.Error as error:
            raise data_loss(
                "A CSV file cannot be read: it is damaged, or of another "
                f"format: {error}. Received: file {head.path}, line 1: "
                f"{head.names[:80]!r}."
            ) from error
        header = tuple(name.strip() for name in names)
        headers.setdefault(header, head.path)
    if len(headers) > 1:
        raise ValueError(
            "CSV files must have the same columns. Received: "
            + "; ".join(f"{list(h)} in {p}" for h, p in sorted(headers.items()))
            + "."
        )
    return list(*headers)


class _Lines:
    """Finds lines of CSV, which go on where a field in quotes does.

    A quote where no field begins or ends damages the line in which its field
    begins; the next line is read as if it were the first.
    """

    def __init__(self, delimiter: str):
        comma = re.escape(delimiter.encode())
        quoted = rb'"[^"]*+(?:""[^"]*+)*+'
        field = rb'(?:%s"|[^"\n%s]*+)' % (quoted, comma)
        self._whole = re.compile(rb"%s(?:%s%s)*+\r?\n" % (field, comma, field))
        # The beginning of a line, or the first of two quotes.
        self._begun = re.compile(
            rb'(?:%s%s)*+(?:%s"?|[^"\n%s]*+)\r?\Z'
            % (field, comma, quoted, comma)
        )

    def __call__(self, contents: bytes) -> Iterator[tuple[bytes, bool]]:
        """Lines with their ends, and whether the quotes are in place."""
        if b'"' not in contents:
            for line in text_blocks.lines_of(contents):
                yield line, True
            return
        whole = contents if contents.endswith(b"\n") else contents + b"\n"
        begin = 0
        while begin < len(contents):
            found = self._whole.match(whole, begin)
            end = found.end() if found else whole.index(b"\n", begin) + 1
            yield contents[begin:end], bool(found)
            begin = end

    def all(self, contents: bytes) -> list[bytes]:
        """The lines with their ends."""
        return [line for line, _ in self(contents)]

    def end(self, contents: bytes, is_last: bool) -> int:
        """As `text_blocks.last_newline`."""
        end = text_blocks.last_newline(contents, is_last)
        if is_last or b'"' not in contents:
            return end
        begin = 0
        while begin < end:
            found = self._whole.match(contents, begin)
            if (
                not found
                and len(contents) - begin < _LONGEST
                and self._begun.match(contents, begin)
            ):
                return begin
            begin = found.end() if found else contents.index(b"\n", begin) + 1
        return begin


class _Parser:
    """Reads lines of some columns.

    Attributes:
        rows: `RowFormat` of those that have a dtype.
    """

    def __init__(self, columns, dtypes, lines, delimiter):
        import pyarrow
        from pyarrow import csv as pyarrow_csv

        self._columns = columns
        self._lines = lines
        self._dtypes = {
            str(number): dtypes[name]
            for number, name in enumerate(columns)
            if name in dtypes
        }
        self.rows = RowFormat(
            {(n,): Leaf(dtypes[n], (), 0) for n in columns if n in dtypes}
        )
        # By their numbers: names may come twice where they are not read.
        self._names = [str(number) for number in range(len(columns))]
        self._parse = pyarrow_csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True
        )
        self._convert = pyarrow_csv.ConvertOptions(
            column_types={
                number: pyarrow.binary()
                if dtype in (tf.string, tf.bool)
                else pyarrow.from_numpy_dtype(dtype.as_numpy_dtype)
                for number, dtype in self._dtypes.items()
            },
            include_columns=list(self._dtypes),
            null_values=[""],
            strings_can_be_null=False,
        )

    def read(self, contents: bytes) -> list[np.ndarray]:
        """The rows of some lines, packed."""
        import pyarrow
        from pyarrow import csv as pyarrow_csv

        if not contents.strip(b"\r\n"):
            return self.rows.packed(
                np.zeros([0], leaf.dtype.as_numpy_dtype)
                for leaf in self.rows.leaves.values()
            )
        table = pyarrow_csv.read_csv(
            pyarrow.BufferReader(contents),
            read_options=pyarrow_csv.ReadOptions(
                column_names=self._names,
                use_threads=False,
                block_size=len(contents) + 1,
            ),
            parse_options=self._parse,
            convert_options=self._convert,
        )
        return self.rows.packed(
            self._values(number, dtype, table[number])
            for number, dtype in self._dtypes.items()
        )

    def _values(self, number, dtype, column):
        if dtype == tf.bool:
            column = self._booleans(number, column)
        elif dtype != tf.string:
            column = column.fill_null(0)
        return arrow_columns.values(column, dtype)

    def _booleans(self, number, column):
        import pyarrow
        from pyarrow import compute

        words = compute.ascii_lower(
            compute.ascii_trim_whitespace(column.cast(pyarrow.string()))
        )
        known = compute.is_in(words, pyarrow.array(_TRUE + _FALSE))
        if not compute.all(known).as_py():
            word = compute.filter(column, compute.invert(known))[0].as_py()
            raise ValueError(
                f"In CSV column #{number}: not a valid bool: {word.decode()}"
            )
        return compute.is_in(words, pyarrow.array(_TRUE))

    def look(self, contents: bytes, first_only: bool) -> text_blocks.Looked:
        """The rows of some lines, and lines that cannot be read."""
        if b'"' not in contents:
            with contextlib.suppress(ValueError):
                return text_blocks.Looked(len(self.read(contents)[0]))
        lines, are_whole = zip(*self._lines(contents), strict=True)
        damaged = {
            number: "Quoted fields must begin and end with the field"
            for number, is_whole in enumerate(are_whole)
            if not is_whole
        }
        others = [n for n in range(len(lines)) if n not in damaged]

        def read(first, last):
            return self.read(b"".join(lines[n] for n in others[first:last]))

        failures = unreadable(len(others), read)
        for number, error in itertools.islice(
            failures, 1 if first_only else None
        ):
            damaged[others[number]] = self._reason(error)
        num_rows = 0
        if not (damaged and first_only):
            num_rows = len(self.read(text_blocks.without(lines, damaged))[0])
        return text_blocks.Looked(num_rows, lines, damaged)

    def _reason(self, error):
        """The message of pyarrow with the name of the column."""
        message = re.sub(r"Row #\d+: ", "", str(error))
        found = re.match(r"In CSV column #(\d+): ", message)
        if found is None:
            return message
        name = self._columns[int(found.group(1))]
        return f"column {name!r}: {message[found.end() :]}"
