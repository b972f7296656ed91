"""Many files are indexed at the same time, and their indices are kept.

The index of a file says where its records begin. To find that, the file must be
read; keeping the index pays off if files are many, large or remote:

    index_dir/3f9a...e1.npz    sizes of the records; path, length and time of
                               the file, which must be unchanged

Workers that start together with one directory share the work: each begins with
other files, and reads no file whose index is kept by then.
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
_NUM_THREADS = 32  # most of them wait for a server
_PROGRESS_AFTER = 1.0  # seconds
_WAITED = 1e-3  # seconds for a file, in which another one could be read


def index_files(
    paths: list[str],
    scan: Callable[[str], _Index],
    index_dir: str | os.PathLike[str] | None,
) -> list[_Index]:
    """The indices of files, in their order: what `scan` returns of each path.

    Indices that are kept in `index_dir` are of `FileIndex`.
    """
    if index_dir is not None:
        index_dir = os.fspath(index_dir)
        tf.io.gfile.makedirs(index_dir)

    def one(path):
        return _kept_or_scanned(path, scan, index_dir)

    # Each worker begins with other files. The program's random numbers may
    # have the same seed in all workers.
    order = random.SystemRandom().sample(range(len(paths)), len(paths))
    found: dict[int, _Index] = {}
    begin, progress = time.monotonic(), None

    def add(number, index):
        nonlocal progress
        found[number] = index
        if progress or time.monotonic() - begin > _PROGRESS_AFTER:
            progress = progress or keras.utils.Progbar(
                len(paths), unit_name="file"
            )
            progress.update(len(found))

    while len(found) < len(paths):
        number = order[len(found)]
        start = time.monotonic() - time.thread_time()
        add(number, one(paths[number]))
        if time.monotonic() - time.thread_time() - start > _WAITED:
            break
    # Threads gain only if files are waited for: they have one interpreter.
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        todo = {pool.submit(one, paths[n]): n for n in order[len(found) :]}
        try:
            for future in concurrent.futures.as_completed(todo):
                add(todo[future], future.result())  # an error ends it
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [found[number] for number in range(len(paths))]


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
    try:
        with tf.io.gfile.GFile(kept_path, "rb") as file:
            kept = np.load(io.BytesIO(file.read()))
            return kept["sizes"] if str(kept["about"]) == about else None
    except tf.errors.NotFoundError:
        return None
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # damaged: it will be written again


def _write(kept_path, about, sizes):
    buffer = io.BytesIO()
    np.savez(buffer, about=np.array(about), sizes=sizes)
    partial = f"{kept_path}.{uuid.uuid4().hex}"
    with tf.io.gfile.GFile(partial, "wb") as file:
        file.write(buffer.getvalue())
    tf.io.gfile.rename(partial, kept_path, overwrite=True)
