"""Files by pattern: each is a record."""

import numpy as np
import tensorflow as tf

from tfscale.data.source import IndexedSource


def match(pattern):
    """The files that a pattern names, sorted, so that they have numbers.

    Args:
        pattern: String or list of strings: paths or globs.

    Returns:
        A list of paths.

    Raises:
        FileNotFoundError: If a pattern matches nothing.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    paths = []
    for one in patterns:
        found = tf.io.gfile.glob(one)
        if not found:
            raise FileNotFoundError(
                f"No file matches the pattern. Received: {one!r}. Check the "
                "path and its wildcards; `tf.io.gfile.glob` is what reads it."
            )
        paths.extend(found)
    if not paths:
        raise FileNotFoundError("No file is named. Received: an empty list.")
    return sorted(set(paths))


def files(pattern):
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
    return _source("files", paths, np.array(paths, dtype=object))


def labelled(kind, paths, labels, *, decode=None, class_names=()):
    """Each file is a record: `(contents, label)`.

    Args:
        kind: String, the builder's name.
        paths: List of strings.
        labels: Integer array of shape `(len(paths),)`.
        decode: Function of `(contents, label)` that returns the record.
        class_names: Tuple of strings.

    Returns:
        A source of `(contents, label)`, a scalar string and an int32 scalar.
    """
    labels = np.asarray(labels, np.int32)
    return _source(kind, paths, labels, decode, class_names)


def _source(kind, paths, extras, decode=None, class_names=()):
    all_paths, all_extras = tf.constant(paths), tf.constant(extras)

    def read(index):
        contents = tf.io.read_file(tf.gather(all_paths, index))
        return contents, tf.gather(all_extras, index)

    def split(num_workers, worker):
        sizes = [len(paths[w::num_workers]) for w in range(num_workers)]
        own = slice(worker, None, num_workers)
        own = _source(kind, paths[own], extras[own], decode, class_names)
        return own, sizes

    return IndexedSource(
        kind=kind,
        num_records=len(paths),
        read=read,
        decode=decode,
        split=split,
        class_names=class_names,
        identity=lambda: repr((paths, extras.tolist())).encode(),
    )
