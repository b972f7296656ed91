"""Files by pattern: each is a record."""

import os
import pathlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import split_by_file

Pattern = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def match(pattern: Pattern) -> list[str]:
    """The files that a pattern names, sorted."""
    if isinstance(pattern, str | os.PathLike):
        pattern = [pattern]
    if not isinstance(pattern, Iterable) or isinstance(pattern, bytes):
        raise TypeError(
            "Files must be given as a string or path, or a list of them. "
            f"Received: {pattern!r}."
        )
    paths = []
    for each in pattern:
        one = os.fspath(each)
        if "**" in pathlib.PurePath(one).parts:
            raise ValueError(
                "`**` is not supported: it would match one folder, as `*` "
                f"does. Received: {one!r}. Write a `*` for each level of "
                "folders, or pass a list of files."
            )
        try:
            # The name of a file may have brackets.
            is_file = tf.io.gfile.exists(one)
            found = [one] if is_file else tf.io.gfile.glob(one)
        except tf.errors.UnimplementedError as error:
            raise ValueError(
                "Files must be on a disk or a file system that `tf.io.gfile` "
                f"knows. Received: {one!r}. Mount it or copy the files; "
                "`tfscale.data.dataset` reads anything that Python can."
            ) from error
        if not found:
            raise FileNotFoundError(
                f"The pattern must match a file. Received: {one!r}. Check the "
                "path and its wildcards, which `tf.io.gfile.glob` reads; "
                "write a '[' of a folder's name as '[[]'."
            )
        paths.extend(found)
    if not paths:
        raise FileNotFoundError(
            "At least one file must be given. Received: an empty list."
        )
    paths = sorted(set(paths))
    if tf.io.gfile.isdir(paths[0]):
        raise FileNotFoundError(
            "A pattern must match files. Received: the directory "
            f"{paths[0]!r}. Use {os.path.join(paths[0], '*')!r}."
        )
    return paths


def files(pattern: Pattern) -> IndexedSource:
    """Each file is a record: `(contents, path)`.

    Args:
        pattern: Path or glob, or a list of them, for `tf.io.gfile`.

    Returns:
        A source of `(contents, path)`, both scalar strings.

    Raises:
        FileNotFoundError: If no file matches.
        ValueError: If a pattern has a folder `**`.

    Example:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> tf.io.write_file(folder + "/a.txt", "text")
    >>> files(folder + "/*.txt").num_records
    1
    """
    return labeled(
        "files",
        [(path, 0.0) for path in match(pattern)],
        lambda contents, _, path: (contents, path),
    )


def labeled(
    kind: str,
    files: Sequence[tuple[str, float]],
    record: Callable[..., Any] = lambda *record: record,
    **kwargs: Any,
) -> IndexedSource:
    """A source of files with a number each: `record(contents, number, path)`.

    `kwargs` are arguments of `IndexedSource`.
    """
    paths, numbers = map(list, zip(*files)) if files else ([], [])
    all_paths, all_numbers = tf.constant(paths, tf.string), tf.constant(numbers)

    def read(index):
        path = tf.gather(all_paths, index)
        number = tf.gather(all_numbers, index)
        return record(tf.io.read_file(path), number, path)

    return IndexedSource(
        kind=kind,
        num_records=len(files),
        read=read,
        split=split_by_file(
            files,
            [1] * len(files),
            lambda shard: labeled(kind, shard, record, **kwargs),
        ),
        identity=lambda: repr((paths, numbers)).encode(),
        **kwargs,
    )
