"""A cache on disk: parsed records written once, read by their numbers.

A cache is written under a random name, and renamed at the end. So a killed run
leaves neither a lock nor half a cache, and two runs can write the same cache,
also in two containers, where names of hosts and numbers of processes may be the
same. While it is written it is locked, which tells it from what a killed run
has left.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.caches import component_files
from tfscale.data.packing import Packing

_ABOUT = "about.json"


class FileCache:
    """Parsed records of a directory that `write` has written."""

    def __init__(self, directory: str, spec: Any):
        self._directory = directory
        self._packing = Packing(spec)
        try:
            with open(os.path.join(directory, _ABOUT)) as file:
                about = json.load(file)
            for name, size in about["sizes"].items():
                found = os.path.getsize(os.path.join(directory, name))
                if found != size:
                    raise ValueError(
                        f"{name} has {found} bytes where {size} belong"
                    )
            self._files = component_files.ComponentFiles(
                directory, self._packing.specs, about["num_records"]
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"A cache must be complete. Received: cache {directory}, which "
                f"is damaged: {error}. Delete that directory."
            ) from error

    def check(self, numbers: Iterable[int], records: tf.data.Dataset) -> None:
        """Compares records, parsed now, with the kept records of `numbers`."""

        @tf.autograph.experimental.do_not_convert
        def kept_of(number):
            return self.get_or_make(number, None)

        kept = tf.data.Dataset.from_tensor_slices(numbers).map(kept_of)
        for number, one, other in zip(numbers, kept, records, strict=True):
            if _bits(one) != _bits(other):
                raise ValueError(
                    "A cache must hold the current results of `parse`. "
                    f"Received: cache {self._directory}, in which record "
                    f"{number} differs: the data or `parse` have changed. "
                    "Delete that directory or use another `cache_dir`."
                )

    def is_full(self) -> tf.Tensor:
        """Whether every record is there: a bool scalar tensor."""
        return tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def get_or_make(self, index: tf.Tensor, make: Any) -> Any:
        """Records of `index`, as of `MemoryCache`."""
        del make
        return self._packing.unpack(self._files.read(index))


def _bits(record):
    flat = map(tf.io.serialize_tensor, keras.tree.flatten(record))
    return b"".join(tensor.numpy() for tensor in flat)


def path_of(
    cache_dir: str, source: Any, spec: Any, some: tf.data.Dataset
) -> str:
    """The directory of a source's cache within `cache_dir`.

    Its name depends on the data, including `some` records, so sources of one
    shape, such as the files of two workers, may share a `cache_dir`.
    """
    shapes = [
        f"{tensor.dtype.name}{tensor.shape.as_list()}"
        for tensor in keras.tree.flatten(spec)
    ]
    name = f"{source.kind}-rows-{source.num_records}-{'-'.join(shapes)}"
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    data = hashlib.blake2b(digest_size=8)
    if source.identity is not None:
        data.update(source.identity())
    for record in some:
        data.update(_bits(record))
    return os.path.join(cache_dir, f"{name[:100]}-{data.hexdigest()}")


def write(
    directory: str, records: tf.data.Dataset, spec: Any, need: int
) -> None:
    """Writes all parsed records, of `need` bytes, unless a cache is there."""
    _sweep(directory)
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    os.makedirs(parent, exist_ok=True)
    disk = functools.partial(_disk, directory, need)
    with _locked(directory, disk) as partial:
        with disk():
            if need > shutil.disk_usage(parent).free:
                raise OSError("It is too small.")
        _write(partial, records, spec, disk)
        try:
            os.rename(partial, directory)
        except OSError:
            if not os.path.isdir(directory):  # no other run was first
                raise


@contextlib.contextmanager
def _locked(directory, disk):
    """A new directory beside `directory`, locked; removed if it is there."""
    partial = lock = None
    while lock is None:
        with disk():
            partial = f"{directory}.partial-{uuid.uuid4().hex}"
            os.mkdir(partial)
            lock = _lock(partial, is_new=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _lock(partial, is_new=False):
    """An open, locked directory; None if another process has it, or removed it.

    The lock ends with the process. Some file systems have none: there, what is
    not new is left alone.
    """
    try:
        file = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.isdir(partial)
    except BlockingIOError:
        is_ours = False
    except OSError:
        is_ours = is_new
    if is_ours:
        return file
    os.close(file)
    return None


@contextlib.contextmanager
def _disk(directory, need):
    """Explains errors of writing."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        free = shutil.disk_usage(os.path.dirname(directory)).free
        raise OSError(
            "The cache must fit on its disk; nothing of it was kept. "
            f"Received: cache {directory}, which needs {need} bytes, judging "
            f"by its first record, with {free} bytes free. Use another "
            "`cache_dir`, or cache='none'."
        ) from error


def _write(partial, records, spec, disk):
    packing = Packing(spec)

    @tf.autograph.experimental.do_not_convert
    def pack(*one):
        return tuple(packing.pack(one if len(one) > 1 else one[0]))

    packed = records.map(pack)
    count = component_files.write(partial, packed, packing.specs, disk)
    with disk():
        sizes = {
            name: os.path.getsize(os.path.join(partial, name))
            for name in os.listdir(partial)
        }
        about = {"num_records": count, "spec": str(spec), "sizes": sizes}
        with open(os.path.join(partial, _ABOUT), "w") as file:
            json.dump(about, file)


def _sweep(directory):
    """Removes unfinished caches of killed runs."""
    begin = f"{os.path.basename(directory)}.partial-"
    parent = os.path.dirname(directory)
    for name in os.listdir(parent) if os.path.isdir(parent) else ():
        path = os.path.join(parent, name)
        if name.startswith(begin) and (lock := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
