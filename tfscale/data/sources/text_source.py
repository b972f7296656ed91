"""Text as one long row of tokens, cut into windows for language models."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources import array_source
from tfscale.data.sources import file_source
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import data_loss
from tfscale.integers import check_integer


def tokens(
    ids: Any, length: int, *, stride: int | None = None
) -> IndexedSource:
    """Windows of a row of tokens: `(x, y)`, where y is x one token later.

    Args:
        ids: Integer array of shape `(num_tokens,)`.
        length: Integer, tokens in a window.
        stride: Integer, how far a window begins after the one before it.
            Defaults to `length`: every token is predicted once an epoch.

    Returns:
        A source of `(x, y)`, both int32 of shape `(length,)`.

    Raises:
        ValueError: If there are not enough tokens for a window, or one is no
            integer of 32 bits from 0 on.

    Example:

    >>> source = tokens([0, 1, 2, 3, 4, 5], length=2)
    >>> source.num_records
    2
    >>> [part.numpy().tolist() for part in source.read(1)]
    [[2, 3], [3, 4]]
    """
    ids = np.asarray(ids)
    stride = length if stride is None else stride
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            "`ids` must be one row of integers. Received: an array of shape "
            f"{ids.shape} and dtype {ids.dtype}."
        )
    check_integer("length", length)
    check_integer("stride", stride)
    if len(ids) <= length:
        raise ValueError(
            "A window needs one token more than its length. Received: "
            f"{len(ids)} tokens, length={length}. Use more text or a shorter "
            "window."
        )
    array_source.check_tokens(ids, "`ids`")
    row = tf.constant(ids)
    steps = tf.range(length + 1, dtype=tf.int64)

    def gather(index):
        begin = tf.expand_dims(tf.cast(index, tf.int64) * stride, -1)
        window = tf.cast(tf.gather(row, begin + steps), tf.int32)
        return window[..., :-1], window[..., 1:]

    return IndexedSource(
        kind="tokens",
        num_records=(len(ids) - length - 1) // stride + 1,
        read=gather,
        gather=gather,
        in_memory=True,
        identity=lambda: array_source.digest(row),
    )


def text(
    pattern: file_source.Pattern,
    length: int,
    *,
    stride: int | None = None,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
) -> IndexedSource:
    """Windows of the text of files, one after the other.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.
        length: Integer, tokens in a window.
        stride: Integer, as in `tokens`.
        tokenizer: Function from a string to a list of integers; it is called
            once for each file, which must be UTF-8. By default a token is a
            byte.

    Returns:
        A source of `(x, y)`, both int32 of shape `(length,)`.

    Raises:
        FileNotFoundError: If no file matches.
        tf.errors.DataLossError: If a file is not UTF-8.
        ValueError: If there is not enough text for a window, or `tokenizer`
            returns no list of integers of 32 bits from 0 on.

    Example:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> tf.io.write_file(folder + "/a.txt", "abcdef")
    >>> text(folder + "/*.txt", length=2).num_records
    2
    """
    rows = []
    for path in file_source.match(pattern):
        with tf.io.gfile.GFile(path, "rb") as file:
            data = file.read()
        if tokenizer is None:
            rows.append(np.frombuffer(data, np.uint8))
        else:
            rows.append(_tokenized(path, data, tokenizer))
    return tokens(np.concatenate(rows), length, stride=stride)


def _tokenized(path, data, tokenizer):
    """The tokens of a file, as an int32 row."""
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise data_loss(
            f"A file must be UTF-8 for a `tokenizer`. Received: file {path}, "
            f"which is not UTF-8 from byte {error.start} on. Convert it, or "
            "train on bytes, without a `tokenizer`."
        ) from error
    try:
        found = tokenizer(decoded)
    except Exception as error:
        error.add_note(f"`tokenizer` was called with the text of {path}.")
        raise
    try:
        ids = np.asarray(found)
    except ValueError:  # lists of several lengths
        ids = np.empty([0, 0])
    if ids.shape == (0,):
        return ids.astype(np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            "`tokenizer` must return a list of integers. Received: a "
            f"{type(found).__name__} of shape {ids.shape} and dtype "
            f"{ids.dtype} for file {path}. Return only the ids, for example "
            '`tokenizer(text)["input_ids"]`.'
        )
    array_source.check_tokens(ids, f"file {path}")
    return ids.astype(np.int32)
