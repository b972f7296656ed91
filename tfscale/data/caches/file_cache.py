"""A cache on disk: parsed records written once, read by their numbers.

A cache is written under another name, and renamed at the end. So a killed run
leaves neither a lock nor half a cache, and two runs can write the same cache.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale.data.caches import row_file
from tfscale.data.caches.row_file import RowFile
from tfscale.data.caches.string_file import StringFile

_ABOUT = "about.json"


class FileCache:
    """Parsed records of a directory that `write` has written."""

    def __init__(self, directory: str, spec: Any):
        self._directory = directory
        self._spec = spec
        flat = keras.tree.flatten(spec)
        try:
            with open(os.path.join(directory, _ABOUT)) as file:
                num_records = json.load(file)["num_records"]
            self._file = _format(flat)(directory, flat, num_records)
            for name, size in self._file.sizes().items():
                found = os.path.getsize(os.path.join(directory, name))
                if found != size:
                    raise ValueError(
                        f"{name} has {found} bytes where {size} belong"
                    )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"A cache must be whole. Received: cache {directory}, which is "
                f"damaged: {error}. Delete that directory."
            ) from error

    def check(self, numbers: Iterable[int], records: tf.data.Dataset) -> None:
        """Compares records, parsed now, with the kept records of `numbers`."""
        kept = tf.data.Dataset.from_tensor_slices(numbers).map(
            lambda number: self.get_or_make(number, None)
        )
        for number, one, other in zip(numbers, kept, records, strict=True):
            if _bits(one) != _bits(other):
                raise ValueError(
                    "A cache must hold what `parse` returns now. Received: "
                    f"cache {self._directory}, whose record {number} differs: "
                    "the data or `parse` have changed. Delete that directory "
                    "or use another `cache_dir`."
                )

    def is_full(self) -> tf.Tensor:
        """Whether every record is there: a bool scalar tensor."""
        return tf.constant(True)

    def get_or_make(self, index: tf.Tensor, make: Any) -> Any:
        """Records of `index`, as of `MemoryCache`."""
        del make
        return keras.tree.pack_sequence_as(self._spec, self._file.read(index))


def _format(specs: list[tf.TensorSpec]) -> type[RowFile | StringFile]:
    return RowFile if row_file.suits(specs) else StringFile


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
    partial = f"{directory}.partial-{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk():
            if need > shutil.disk_usage(parent).free:
                raise OSError("It is too small.")
            os.makedirs(partial)
        _write(partial, records, spec, disk)
        try:
            os.rename(partial, directory)
        except OSError:
            if not os.path.isdir(directory):  # no other run was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _disk(directory, need):
    """Explains errors of writing."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        free = shutil.disk_usage(os.path.dirname(directory)).free
        raise OSError(
            "The cache could not be written; nothing of it is left behind. "
            f"Received: cache {directory}, by its first record of {need} "
            f"bytes, and {free} bytes free on its disk. Use another "
            "`cache_dir`, or cache='none'."
        ) from error


def _write(partial, records, spec, disk):
    specs = keras.tree.flatten(spec)
    tensors = records.map(
        lambda *record: tuple(
            keras.tree.flatten(record if len(record) > 1 else record[0])
        )
    )
    count = _format(specs).write(partial, tensors, specs, disk)
    with disk(), open(os.path.join(partial, _ABOUT), "w") as file:
        json.dump({"num_records": count, "spec": str(spec)}, file)


def _sweep(directory):
    """Removes unfinished caches of killed runs of this host."""
    begin = f"{os.path.basename(directory)}.partial-{socket.gethostname()}-"
    parent = os.path.dirname(directory)
    for name in os.listdir(parent) if os.path.isdir(parent) else ():
        pid = name.removeprefix(begin)
        # The name of another host may begin with that of this host.
        ours = name.startswith(begin) and pid.isdecimal()
        if ours and not _is_alive(int(pid)):
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _is_alive(pid):
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True
