"""Many files are indexed side by side, and what was found is kept.

An index says where the records of one file begin. It is found by reading the
file, so it is worth keeping where files are many, large or far away:

    index_dir/3f9a...e1.npz    sizes of the records, and of which file: its
                               path, length and time, which must be the same

Workers that start together with one directory share the work: each begins with
other files, and files whose index is kept meanwhile are not read again.
"""

import concurrent.futures
import hashlib
import io
import os
import random
import time
import uuid
import zipfile
from collections.abc import Callable
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfscale.data.sources.tfrecord_index import FileIndex

_Index = TypeVar("_Index")
_SIDE_BY_SIDE = 32  # files: a server's answer takes longer than the work
_SOON = 1.0  # seconds after which progress is shown


def index_files(
    paths: list[str],
    scan: Callable[[str], _Index],
    index_dir: str | os.PathLike[str] | None,
) -> list[_Index]:
    """The indices of files, in their order: what `scan` returns of each path.

    Those that are kept in `index_dir`, if there is one, are of `FileIndex`.
    """
    if index_dir is not None:
        index_dir = os.fspath(index_dir)
        tf.io.gfile.makedirs(index_dir)

    def one(path):
        return _kept_or_scanned(path, scan, index_dir)

    # Other files first on every worker. A generator of its own: the program's
    # random numbers are not ours to draw, and may have one seed everywhere.
    order = random.SystemRandom().sample(range(len(paths)), len(paths))
    begin, progress = time.monotonic(), None
    with concurrent.futures.ThreadPoolExecutor(
        min(_SIDE_BY_SIDE, len(paths))
    ) as pool:
        todo = {number: pool.submit(one, paths[number]) for number in order}
        try:
            done = concurrent.futures.as_completed(todo.values())
            for number, future in enumerate(done, 1):
                future.result()  # an error ends it
                if progress or time.monotonic() - begin > _SOON:
                    progress = progress or keras.utils.Progbar(
                        len(paths), unit_name="file"
                    )
                    progress.update(number)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [todo[number].result() for number in range(len(paths))]


def _kept_or_scanned(path, scan, index_dir):
    if index_dir is None:
        return scan(path)
    stat = tf.io.gfile.stat(path)
    about = f"{path}\n{stat.length}\n{stat.mtime_nsec}"
    name = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
    kept_path = os.path.join(index_dir, f"{name}.npz")
    sizes = _read(kept_path, about)
    if sizes is not None:
        return FileIndex(path, np.cumsum(sizes) - sizes, sizes, None)
    index = scan(path)
    if index.damage is None:
        _write(kept_path, about, index.sizes)
    return index


def _read(kept_path, about):
    """Sizes of the records that are kept, or None."""
    if not tf.io.gfile.exists(kept_path):
        return None
    try:
        with tf.io.gfile.GFile(kept_path, "rb") as file:
            kept = np.load(io.BytesIO(file.read()))
            return kept["sizes"] if str(kept["about"]) == about else None
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # not whole: it is written anew


def _write(kept_path, about, sizes):
    buffer = io.BytesIO()
    np.savez(buffer, about=np.array(about), sizes=sizes)
    partial = f"{kept_path}.{uuid.uuid4().hex}"
    with tf.io.gfile.GFile(partial, "wb") as file:
        file.write(buffer.getvalue())
    tf.io.gfile.rename(partial, kept_path, overwrite=True)
