"""Files of backups: written so that they are there once it is said they are.

A path without a scheme is of this machine: data goes to the disk before a name
refers to it (fsync of file and folder). A path such as `gs://bucket/run` goes
through `tf.io.gfile`: there a file appears whole or not at all, once it is
closed.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable

import tensorflow as tf

from tfscale.backup.files.pace import at_once

_CHUNK = 1 << 20


def is_local(path: str) -> bool:
    """Whether a path is of this machine's file systems."""
    return "://" not in path


def join(folder: str, name: str) -> str:
    """The path of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def make_folder(path: str) -> None:
    """Makes a folder and those it is in, if they are not there."""
    tf.io.gfile.makedirs(path)
    if is_local(path):
        _sync(os.path.dirname(os.path.abspath(path)))


def write(path: str, content: bytes) -> None:
    """Writes a file so that it is there whole, or as it was before."""
    if not is_local(path):
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(content)
        return
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(os.path.dirname(os.path.abspath(path)))


def flush(paths: list[str]) -> None:
    """Returns once files that somebody else wrote, of one folder, are there."""
    local = [path for path in paths if is_local(path)]
    for path in local:
        _sync(path)
    if local:
        _sync(os.path.dirname(os.path.abspath(local[0])))


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: If it is not there.
    """
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    except tf.errors.NotFoundError:
        raise FileNotFoundError(path) from None


def size_and_digest(
    path: str, did: Callable[[int], None] = at_once
) -> tuple[int, str]:
    """Bytes of a file and its SHA-256, read chunk by chunk.

    Args:
        path: The file.
        did: Is told of bytes that were read; see `Pace.did`.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                did(len(chunk))
    except tf.errors.NotFoundError:
        raise FileNotFoundError(path) from None
    return size, digest.hexdigest()


def names(folder: str) -> list[str]:
    """What is in a folder, none if there is no folder."""
    try:
        return [n.rstrip("/") for n in tf.io.gfile.listdir(folder)]
    except tf.errors.NotFoundError:
        return []


def is_folder(path: str) -> bool:
    """Whether a path is that of a real folder, and not of a link to one."""
    if is_local(path) and os.path.islink(path):
        return False
    return tf.io.gfile.isdir(path)


def is_file(path: str) -> bool:
    """Whether a path is that of a regular file: no link, pipe or device."""
    if not is_local(path):
        return tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def size(path: str) -> int:
    """Bytes of a file."""
    return tf.io.gfile.stat(path).length


def remove_file(path: str) -> None:
    """Removes a file if it is there."""
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def remove_folder(path: str) -> None:
    """Removes a folder with all that is in it; what links lead to stays."""
    if is_local(path):
        shutil.rmtree(path)
    else:
        tf.io.gfile.rmtree(path)


def rename(old: str, new: str) -> None:
    """Gives a folder another name."""
    tf.io.gfile.rename(old, new)
