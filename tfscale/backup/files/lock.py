"""The lock of a folder of backups: a file LOCK, held by one job at a time.

`flock` belongs to the open file and not to the process: another process that
opens and closes LOCK, such as a copy of the folder, does not end the lock. A
forked child closes its copy at once, so the lock ends with its process.
"""

import contextlib
import fcntl
import os
import weakref

from tfscale import forks

_NAME = "LOCK"
# The open files of the locks that this process holds, by path.
_held: dict[str, int] = {}


class FolderLock:
    """Locks a folder for one job; the lock ends with its process.

    Raises:
        BlockingIOError: If another job has it.
        OSError: If LOCK is no file, or cannot be locked.
    """

    def __init__(self, folder: str):
        self._path = os.path.realpath(folder) + f"/{_NAME}"
        is_locked = False
        while not is_locked:
            file = _open(self._path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(file, 16, 0).decode(errors="replace")
                os.close(file)
                by = f"process {owner or 'unknown'}"
                if self._path in _held:
                    by = "this process"
                raise BlockingIOError(
                    "Only one job may use a folder of backups. Received: "
                    f"backup_dir={folder!r}, in use by {by}. End that job, or "
                    "use another folder."
                ) from None
            except OSError:
                os.close(file)
                raise
            is_locked = _is_at(file, self._path)
            if not is_locked:  # the earlier job has just removed it
                os.close(file)
        forks.in_children(_give_up)
        self._file = _held[self._path] = file
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        self._release = weakref.finalize(self, _release, self._path, file)

    @property
    def is_held(self) -> bool:
        """Whether the folder still has LOCK; a removed folder is free."""
        return _is_at(self._file, self._path)

    def release(self) -> None:
        """Unlocks the folder, and removes LOCK; may be called again."""
        self._release()


def _open(path):
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _is_at(file, path):
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), found)


def _release(path, file):
    if _held.get(path) != file:  # a forked child, which has closed it
        return
    del _held[path]
    if _is_at(file, path):
        with contextlib.suppress(OSError):  # a folder may be read-only by now
            os.remove(path)
    # A child that is forked at this moment has the open file too.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _give_up():
    while _held:
        os.close(_held.popitem()[1])
