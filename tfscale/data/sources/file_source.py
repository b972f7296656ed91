"""Files by pattern: each is a record."""

import os
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import IndexedSource

Pattern = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def match(pattern: Pattern) -> list[str]:
    """The files that a pattern names, sorted, so that they have numbers.

    Args:
        pattern: String or path, or a list of them: paths or globs.

    Returns:
        A list of paths.

    Raises:
        FileNotFoundError: If a pattern matches nothing, or a directory.
        TypeError: If it is no pattern.
        ValueError: If TensorFlow does not know the file system.
    """
    if isinstance(pattern, str | os.PathLike):
        pattern = [pattern]
    if not isinstance(pattern, Iterable) or isinstance(pattern, bytes):
        raise TypeError(
            "Files are named by a string or path, or a list of them. Received: "
            f"{pattern!r}."
        )
    paths = []
    for each in pattern:
        one = os.fspath(each)
        try:
            found = tf.io.gfile.glob(one)
        except tf.errors.UnimplementedError as error:
            raise ValueError(
                "Files must be on a disk or a file system that `tf.io.gfile` "
                f"knows. Received: {one!r}. Mount it or copy the files; "
                "`tfscale.data.dataset` reads what Python can."
            ) from error
        if not found:
            raise FileNotFoundError(
                f"No file matches the pattern. Received: {one!r}. Check the "
                "path and its wildcards; `tf.io.gfile.glob` is what reads it."
            )
        paths.extend(found)
    if not paths:
        raise FileNotFoundError("No file is named. Received: an empty list.")
    paths = sorted(set(paths))
    if tf.io.gfile.isdir(paths[0]):
        raise FileNotFoundError(
            "A pattern must name files. Received: the directory "
            f"{paths[0]!r}. Use {os.path.join(paths[0], '*')!r}."
        )
    return paths


def files(pattern: Pattern) -> IndexedSource:
    """Each file is a record: `(contents, path)`.

    Args:
        pattern: String or list of strings: paths or globs, also of a remote
            file system that `tf.io.gfile` knows.

    Returns:
        A source of `(contents, path)`, both scalar strings.

    Raises:
        FileNotFoundError: If no file matches.

    Example:

    >>> import os
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with open(os.path.join(folder, "a.txt"), "w") as file:
    ...     _ = file.write("text")
    >>> files(folder + "/*.txt").num_records
    1
    """
    paths = match(pattern)
    return _source(
        "files",
        paths,
        np.zeros(len(paths)),
        lambda contents, path, _: (contents, path),
    )


def labelled(
    kind, paths, labels, *, decode, quick_decode, class_names, num_skipped
):
    """Each file is a record: what `decode` makes of contents, label and path.

    `labels` are integers; the rest is as in `IndexedSource`.
    """

    def read(contents, path, label):
        return contents, label, path

    labels = np.asarray(labels, np.int32)
    return _source(
        kind,
        paths,
        labels,
        read,
        decode=decode,
        quick_decode=quick_decode,
        class_names=class_names,
        num_skipped=num_skipped,
    )


def _source(kind, paths, extras, record, **kwargs):
    """Files whose record is `record(contents, path, extra)`."""
    all_paths, all_extras = tf.constant(paths), tf.constant(extras)

    def read(index):
        path = tf.gather(all_paths, index)
        return record(tf.io.read_file(path), path, tf.gather(all_extras, index))

    def split(num_workers, worker):
        sizes = [len(paths[w::num_workers]) for w in range(num_workers)]
        own = slice(worker, None, num_workers)
        return _source(kind, paths[own], extras[own], record, **kwargs), sizes

    return IndexedSource(
        kind=kind,
        num_records=len(paths),
        read=read,
        split=split,
        identity=lambda: repr((paths, extras.tolist())).encode(),
        **kwargs,
    )
