"""A folder of backups: the newest that verifies, and a few older ones."""

import collections
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator

import tensorflow as tf

from tfscale.backup.files import committed
from tfscale.backup.files.lock import FolderLock
from tfscale.backup.files.storage import storage_of
from tfscale.cluster.coordination import Coordination

_SECONDS_TO_SEE = 10.0  # until another machine sees a file
_SECONDS = 0.1  # between two looks
_WAITS = (1.0, 4.0)  # seconds, after errors of reading
# Calls of `fit` of this process that have ended well, by folder.
_ended: collections.Counter[str] = collections.Counter()


class BackupFolder:
    """The backups of one run; one job at a time writes them.

    Attributes:
        fit: Number of the `fit` in the program, whose backups these are; None
            for those of all.
    """

    def __init__(self, path: str, keep: int, fit: int | None = 1):
        self.path = path
        self.fit = fit
        self._storage = storage_of(path)
        self._keep = keep
        self._lock: FolderLock | None = None

    def begin_fit(self) -> None:
        """Notes which `fit` of the program with this folder begins."""
        self.fit = 1 + _ended[self._storage.real_path]

    def end_fit(self) -> None:
        """Notes that the `fit` has ended well."""
        _ended[self._storage.real_path] += 1

    @property
    def progress_file(self) -> str | None:
        """The file in which a `fit` notes its steps, if there may be one."""
        name = "PROGRESS" if self.fit == 1 else f"PROGRESS-{self.fit}"
        return self._storage.progress_file(name)

    def acquire(self) -> None:
        """Creates the folder, and locks it for this job.

        Raises:
            BlockingIOError: If another job has it.
            OSError: If it cannot be written to.
        """
        try:
            self._storage.make_folder()
            self._lock = self._storage.lock()
        except (BlockingIOError, ConnectionError):  # Or a worker is gone.
            raise
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise OSError(
                "`backup_dir` must be writable. Received: "
                f"backup_dir={self.path!r}: {error}. Make it writable, or use "
                "another one."
            ) from error

    def be_seen(self, workers: Coordination) -> None:
        """Raises, in all workers, if one does not see what worker 0 writes."""
        if workers.count == 1:
            return
        name = workers.from_first("token", self._write_token)
        seen = workers.to_first("sees", lambda: self._sees(name))
        if workers.index == 0:
            self._storage.remove_file(name)
        workers.from_first("all see", lambda: self._check_seen(seen))

    def _write_token(self):
        name = f"SEEN-{uuid.uuid4().hex}"
        self._storage.write(name, b"")
        return name

    def _sees(self, name):
        end = time.monotonic() + _SECONDS_TO_SEE
        while not self._storage.is_file(name):
            if time.monotonic() > end:
                return False
            time.sleep(_SECONDS)
        return True

    def _check_seen(self, seen):
        blind = [index for index, sees in enumerate(seen) if not sees]
        if blind:
            raise OSError(
                "`backup_dir` must be one folder that all workers see. "
                f"Received: backup_dir={self.path!r}, in which workers {blind} "
                "do not see the files of worker 0. Use an absolute path of a "
                "shared file system."
            )

    def release(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def newest(self, *, leave_damaged: bool = False) -> committed.Backup | None:
        """The newest backup that verifies; `leave_damaged` changes no file.

        Unfinished backups are removed. Those that were read and do not verify
        get a name that begins with `damaged-`, and the reason is logged.

        Raises:
            DamagedBackupError: If there are backups and none verifies.
            OSError: If they cannot be read, after some tries.
        """
        for seconds in (*_WAITS, None):
            try:
                return self._newest(leave_damaged)
            except (OSError, tf.errors.OpError) as error:
                if seconds is None:
                    raise OSError(
                        "Backups must be readable. Received: "
                        f"backup_dir={self.path!r}: {error}. Nothing was "
                        "changed. Start again when they can be read, or use "
                        "another `backup_dir` to start from the beginning."
                    ) from error
                logging.warning("Reading a backup is tried again: %s.", error)
                time.sleep(seconds)
        return None

    def _newest(self, leave_damaged):
        self._warn_of_later_fits()
        reasons = {
            name: committed.reason(self._storage.path_of(name))
            for name in committed.damaged(self.path, self.fit)
        }
        for name in committed.begun(self.path, self.fit):
            path = self._storage.path_of(name)
            if committed.is_unfinished(path):
                if not leave_damaged:
                    logging.info("Backup %s is unfinished, and removed.", path)
                    storage_of(path).remove_folder()
                continue
            try:
                return committed.open_backup(path)
            except committed.DamagedBackupError as error:
                if leave_damaged and name not in committed.begun(self.path):
                    continue  # it was removed by the job that writes
                reasons[name] = str(error)
            if leave_damaged:
                logging.warning(
                    "Backup %s is left out: %s.", path, reasons[name]
                )
            else:
                self._set_aside(name, reasons[name])
        if reasons:
            name, reason = next(iter(reasons.items()))
            raise committed.DamagedBackupError(
                f"At least one backup must be intact. Received: {len(reasons)} "
                f"damaged backups in {self.path!r}, for example {name!r}: "
                f"{reason}. Remove them, or use another `backup_dir`, to start "
                "from the beginning."
            )
        return None

    def _warn_of_later_fits(self):
        """Says that backups of later calls of `fit` are left for these."""
        names = committed.begun(self.path)
        later = max(map(committed.fit_of, names), default=1)
        if self.fit is not None and later > self.fit:
            logging.warning(
                "Backups in %r are of `fit` number %d of a program, and this "
                "is number %d with this folder: they are left for the later "
                "one. If the program has skipped a `fit`, give each a folder "
                "of its own.",
                self.path,
                later,
                self.fit,
            )

    def _set_aside(self, name, reason):
        path = self._storage.path_of(name)
        logging.warning("Backup %s is set aside: %s.", path, reason)
        try:
            committed.set_aside(self.path, name, reason)
        except (OSError, tf.errors.OpError) as error:
            logging.warning("It stays where it is: %s.", error)

    def commit(self, step, shards, state, workers: Coordination | None = None):
        """Writes this worker's files; worker 0 removes backups beyond `keep`.

        Raises:
            BlockingIOError: If the folder was removed, and created by another
                job.
            ConnectionError: If a worker is gone.
            OSError: If it cannot be written; earlier backups are unchanged.
        """
        try:
            self._commit(step, shards, state, workers or Coordination())
        except (BlockingIOError, ConnectionError):  # Or a worker is gone.
            raise
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                f"Each backup must be saved. Received: {error}, after {step} "
                f"steps, in {self.path!r}. Earlier backups are unchanged. Free "
                "space there, or make the folder writable, and start again."
            ) from error

    def _commit(self, step, shards, state, workers):
        path = workers.from_first(f"folder/{step}", lambda: self._begin(step))
        index = workers.index
        with _removed_if_unfinished(path if index == 0 else None):
            contents = workers.to_first(
                f"files/{step}",
                lambda: committed.write_files(path, shards, state, index),
            )
            # No worker ends before the backup is complete; worker 0 is last.
            workers.from_first(
                f"sealed/{step}", lambda: self._seal(path, step, contents)
            )
        workers.to_first(f"seen/{step}", lambda: True)

    def _begin(self, step):
        """Creates the folder of a backup, and that of all if it was removed."""
        if self._lock is not None and not self._lock.is_held:
            self.release()
            self.acquire()
        return committed.begin(self.path, step, self.fit or 1)

    def _seal(self, path, step, contents):
        committed.seal(path, step, contents)
        paths = map(self._storage.path_of, committed.begun(self.path, self.fit))
        for path in [*filter(committed.is_complete, paths)][self._keep :]:
            committed.remove(path)

    def clear(self) -> None:
        """Removes all backups of the `fit`, damaged ones too."""
        for name in committed.begun(self.path, self.fit):
            committed.remove(self._storage.path_of(name))
        for name in committed.damaged(self.path, self.fit):
            storage_of(self._storage.path_of(name)).remove_folder()


@contextlib.contextmanager
def _removed_if_unfinished(path):
    """Removes a backup that failed: its disk may be full."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, tf.errors.OpError):
            if path is not None and committed.is_unfinished(path):
                storage_of(path).remove_folder()
        raise


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Logs an error of the file system, which ends the block."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        logging.warning("%s: %s", what, error)
