"""A CSV file: where its lines begin, and which of them cannot be read."""

import csv
import functools

import numpy as np
import tensorflow as tf

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_MARK = b"\xef\xbb\xbf"  # with which spreadsheets begin UTF-8


class CsvFile:
    """The lines of one file.

    Args:
        path: String.
        has_header: Whether the first line names the columns.

    Attributes:
        path: String.
        header: String, the first line, or "".
        begins: int64 array, where each other line begins.
        lengths: int64 array, their bytes without the end of the line.
    """

    def __init__(self, path, has_header):
        with tf.io.gfile.GFile(path, "rb") as file:
            data = np.frombuffer(file.read(), np.uint8)
        inside = np.cumsum(data == _QUOTE) % 2 == 1
        ends = np.flatnonzero((data == _NEWLINE) & ~inside)
        if data.size and (not ends.size or ends[-1] != data.size - 1):
            ends = np.append(ends, data.size)
        # Between two ends; quoted fields may hold newlines.
        begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        begins = begins[: ends.size]
        begins[:1] += len(_MARK) if data[:3].tobytes() == _MARK else 0
        returns = (ends > begins) & (data[ends - 1] == _RETURN)
        ends = ends - returns  # lines end in CR LF as well
        filled = ends > begins
        begins, ends = begins[filled], ends[filled]
        self.path = path
        self.header = ""
        if has_header and ends.size:
            header = data[begins[0] : ends[0]].tobytes()
            self.header = header.decode("utf-8", errors="replace")
            begins, ends = begins[1:], ends[1:]
        self.begins = begins
        self.lengths = (ends - begins).astype(np.int64)

    def columns(self, delimiter):
        """Names of the columns, as the header has them.

        Raises:
            tf.errors.DataLossError: If it is no text.
        """
        try:
            if "\0" in self.header:
                raise csv.Error("it is no text")
            (names,) = csv.reader([self.header], delimiter=delimiter)
        except csv.Error as error:
            raise tf.errors.DataLossError(
                None,
                None,
                "A CSV file cannot be read: it is damaged, or of another "
                f"format: {error}. Received: file {self.path}, line 1: "
                f"{self.header[:80]!r}.",
            ) from error
        return [name.strip() for name in names]

    def check(self, columns, dtypes, delimiter, on_damage):
        """Leaves out lines that cannot be read.

        Args:
            columns: List of strings, the columns of the file.
            dtypes: Dict from some of them to `tf.DType`.
            delimiter: String of one character.
            on_damage: `"raise"` or `"skip"`.

        Returns:
            Integer, how many there were.

        Raises:
            tf.errors.DataLossError: If there is one and `on_damage` is
                `"raise"`.
        """
        with tf.io.gfile.GFile(self.path, "rb") as file:
            contents = file.read()
        lines = tf.strings.substr(contents, self.begins, self.lengths)
        # All fields, so that one too few or too many is found.
        defaults = [default(dtypes.get(name, tf.string)) for name in columns]

        def damage(first, last):
            try:
                fields = tf.io.decode_csv(
                    lines[first:last], defaults, field_delim=delimiter
                )
                for name, values in zip(columns, fields, strict=True):
                    if dtypes.get(name) == tf.bool:
                        _check_booleans(values)
            except tf.errors.InvalidArgumentError as error:
                if last - first == 1:
                    return [(first, _reason(error))]
                middle = (first + last) // 2
                found = damage(first, middle)
                if found and on_damage == "raise":
                    return found  # one is enough
                return found + damage(middle, last)
            return []

        found = damage(0, len(self.begins)) if len(self.begins) else []
        if found and on_damage == "raise":
            number, reason = found[0]
            begin = int(self.begins[number])
            line = contents.count(b"\n", 0, begin) + 1
            raise tf.errors.DataLossError(
                None,
                None,
                f"A line of a CSV file cannot be read: {reason}. Received: "
                f"file {self.path}, offset {begin}, line {line}: "
                f"{lines[number].numpy()[:80]!r}. To leave out what cannot be "
                "read, use on_damage='skip'.",
            )
        damaged = [number for number, _ in found]
        self.begins = np.delete(self.begins, damaged)
        self.lengths = np.delete(self.lengths, damaged)
        return len(damaged)


def default(dtype):
    """What an empty field is, as `tf.io.decode_csv` takes it."""
    if dtype in (tf.string, tf.bool):  # which it reads as a string
        return tf.constant([""])
    return tf.constant([0], dtype)


def booleans(fields):
    """Fields of true, false, 1 and 0, in any case of letters, as booleans."""
    return _is_one_of(fields, _TRUE)


def _check_booleans(fields):
    known = _is_one_of(fields, _TRUE + _FALSE)
    unknown = tf.boolean_mask(fields, ~known).numpy()
    if unknown.size:
        raise tf.errors.InvalidArgumentError(
            None, None, f"Field is not a valid bool: {unknown[0].decode()}"
        )


def _is_one_of(fields, words):
    lower = tf.strings.lower(tf.strings.strip(fields))
    return functools.reduce(
        tf.logical_or, [tf.equal(lower, word) for word in words]
    )


def _reason(error):
    """What TensorFlow says, without where in its graph."""
    reason = error.message.split("}}")[-1].split(" [Op:")[0].strip()
    return reason.removesuffix(" in record 0")
