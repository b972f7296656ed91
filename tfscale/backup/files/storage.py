"""The files of backups: a file exists for good once it is written.

A path without a scheme is of this machine: data is on the disk before a name
refers to it (fsync of file and folder). A path such as `gs://bucket/run` goes
through `tf.io.gfile`: there a file appears whole or not at all, once it is
closed. Another store is another subclass, in `storage_of`. An error of reading
is raised: only a file that is known to be missing counts as missing.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence

import tensorflow as tf

from tfscale.backup.files.lock import FolderLock

_CHUNK = 1 << 20
# Of Lustre without the option `flock`, and of NFS without a lock manager.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# TensorFlow reads a checkpoint whose prefix, as a pattern of files, matches
# itself: of the characters of patterns, not these.
_PATTERNS = "[\\"
_FILE = re.compile("file://(localhost)?(?=/)")
_SCHEME = re.compile(r"[a-zA-Z][0-9a-zA-Z.+-]*://")


class Storage:
    """A folder in an object store, or in another file system of `tf.io.gfile`.

    `joins_files` says whether tensors may be written in several files that are
    joined at the end, which copies if files cannot be renamed.
    """

    joins_files = False

    def __init__(self, path: str):
        self._path = path

    def path_of(self, name: str) -> str:
        """The path of a file or folder in it."""
        return f"{self._path.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def without_patterns(self) -> Iterator[str]:
        """A path of the folder that TensorFlow takes for no file pattern."""
        yield self._path

    def make_folder(self) -> None:
        """Creates the folder and its parents, if they are missing."""
        tf.io.gfile.makedirs(self._path)

    def remove_folder(self) -> None:
        """Removes the folder with its content; targets of links stay."""
        tf.io.gfile.rmtree(self._path)

    def lock(self) -> FolderLock | None:
        """Locks the folder for one job; object stores cannot."""
        return None

    def progress_file(self, name: str) -> str | None:
        """A file for the number of steps, if a file can be changed often."""
        return None

    @property
    def real_path(self) -> str:
        """The path, which is the same for all ways to write it."""
        return self._path

    def names(self) -> list[str]:
        """The names in the folder; none if there is no folder."""
        try:
            return [n.rstrip("/") for n in tf.io.gfile.listdir(self._path)]
        except tf.errors.NotFoundError:
            return []

    def is_folder(self, name: str) -> bool:
        """Whether it is a real folder, and not a link to one."""
        try:
            return tf.io.gfile.stat(self.path_of(name)).is_directory
        except tf.errors.NotFoundError:
            return False

    def is_file(self, name: str) -> bool:
        """Whether it is a regular file: no link, pipe or device."""
        is_there = tf.io.gfile.exists(self.path_of(name))
        return is_there and not self.is_folder(name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which is whole or unchanged at any time."""
        with tf.io.gfile.GFile(self.path_of(name), "wb") as file:
            file.write(content)

    def flush(self, names: Sequence[str]) -> None:
        """Returns once files that others wrote are on the disk."""

    def read(self, name: str) -> bytes:
        """The content of a file, or a `FileNotFoundError`."""
        with self._open(name) as file:
            return file.read()

    def size_and_digest(self, name: str) -> tuple[int, str]:
        """Bytes of a file and its SHA-256, read chunk by chunk."""
        digest, size = hashlib.sha256(), 0
        with self._open(name) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return size, digest.hexdigest()

    @contextlib.contextmanager
    def _open(self, name):
        try:
            with tf.io.gfile.GFile(self.path_of(name), "rb") as file:
                yield file
        except tf.errors.NotFoundError:
            raise FileNotFoundError(self.path_of(name)) from None

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return tf.io.gfile.stat(self.path_of(name)).length

    def remove_file(self, name: str) -> None:
        """Removes a file if it is there."""
        if tf.io.gfile.exists(self.path_of(name)):
            tf.io.gfile.remove(self.path_of(name))

    def rename(self, old: str, new: str) -> None:
        """Gives a folder in it another name."""
        tf.io.gfile.rename(self.path_of(old), self.path_of(new))


class LocalStorage(Storage):
    """A folder in a file system of this machine."""

    joins_files = True

    @contextlib.contextmanager
    def without_patterns(self) -> Iterator[str]:
        """See `Storage`."""
        if set(_PATTERNS).isdisjoint(self._path):
            yield self._path
            return
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.abspath(self._path), f"{folder}/link")
            yield f"{folder}/link"

    def make_folder(self) -> None:
        """See `Storage`."""
        if not os.path.isdir(self._path):
            super().make_folder()
            # The parent of an existing folder may not be readable.
            _sync(os.path.dirname(os.path.abspath(self._path)))

    def remove_folder(self) -> None:
        """See `Storage`."""
        shutil.rmtree(self._path)

    def lock(self) -> FolderLock | None:
        """See `FolderLock`; None in a file system without locks."""
        try:
            return FolderLock(self._path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logging.warning(
                "The file system of %r has no locks (%s): see to it that one "
                "job at a time uses the folder.",
                self._path,
                error.strerror,
            )
            return None

    def progress_file(self, name: str) -> str:
        """See `Storage`."""
        return self.path_of(name)

    @property
    def real_path(self) -> str:
        """See `Storage`."""
        return os.path.realpath(self._path)

    def is_folder(self, name: str) -> bool:
        """See `Storage`."""
        return stat.S_ISDIR(self._mode(name))

    def is_file(self, name: str) -> bool:
        """See `Storage`."""
        return stat.S_ISREG(self._mode(name))

    def _mode(self, name):
        try:
            return os.lstat(self.path_of(name)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def write(self, name: str, content: bytes) -> None:
        """See `Storage`."""
        path = self.path_of(name)
        with open(f"{path}.tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
        _sync(self._path)

    def flush(self, names: Sequence[str]) -> None:
        """See `Storage`."""
        for path in (*map(self.path_of, names), self._path):
            _sync(path)


def storage_of(folder: str) -> Storage:
    """The storage of a folder, by its path.

    Raises:
        ValueError: If TensorFlow could write to the path, but not read it.
    """
    folder = _FILE.sub("", folder, count=1) if _FILE.match(folder) else folder
    if not _SCHEME.match(folder):
        return LocalStorage(folder)
    if patterns := set(folder) & set(_PATTERNS):
        raise ValueError(
            "A remote `backup_dir` must have no wildcard, because TensorFlow "
            "reads the path of a checkpoint as a pattern. Received: "
            f"backup_dir={folder!r} with {sorted(patterns)}. Rename the folder."
        )
    return Storage(folder)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
