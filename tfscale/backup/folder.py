"""A folder of backups: the newest that verifies, and no more than a few."""

import logging
from collections.abc import Callable

import tensorflow as tf

from tfscale.backup import committed
from tfscale.backup import storage
from tfscale.backup.company import Company
from tfscale.backup.pace import at_once

_DAMAGED = "damaged-"


class BackupFolder:
    """The backups of one run, of which one job at a time writes.

    Args:
        path: Of the file system or of `tf.io.gfile`.
        keep: How many backups to keep.
    """

    def __init__(self, path: str, keep: int):
        self.path = path
        self._keep = keep
        self._lock: storage.FolderLock | None = None

    def acquire(self) -> None:
        """Makes the folder, and keeps it for this job.

        Raises:
            BlockingIOError: If another job has it.
            OSError: If it cannot be written to.
        """
        try:
            storage.make_folder(self.path)
            self._lock = storage.FolderLock(self.path)
        except BlockingIOError:
            raise
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                "`backup_dir` must be a folder that can be written to. "
                f"Received: backup_dir={self.path!r}: {error}. Make it "
                "writable, or take another one."
            ) from error

    def release(self) -> None:
        """Lets other jobs have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def newest(self, *, leave_damaged: bool = False) -> committed.Backup | None:
        """The newest backup that verifies.

        What a kill left unfinished is removed. A complete one that does not
        verify is set aside, under a name that begins with `damaged-`, and the
        reason is logged.

        Args:
            leave_damaged: Whether to leave all that is there as it is, since
                another job may be writing.

        Raises:
            DamagedBackupError: If there are backups and none verifies.
        """
        for name in committed.begun(self.path):
            path = storage.join(self.path, name)
            if not committed.is_complete(path):
                if not leave_damaged:
                    storage.remove_folder(path)
                continue
            try:
                return committed.open_backup(path)
            except committed.DamagedBackupError as error:
                if leave_damaged:
                    continue
                logging.warning("Backup %s is set aside: %s.", path, error)
                aside = storage.join(self.path, _DAMAGED + name)
                storage.rename(path, aside)
                reason = storage.join(aside, "REASON")
                storage.write(reason, str(error).encode())
        damaged = [
            name
            for name in storage.names(self.path)
            if name.startswith(_DAMAGED)
        ]
        if damaged:
            raise committed.DamagedBackupError(
                "One of the backups must be what was written. Received: "
                f"{len(damaged)} in {self.path!r} that are not, such as "
                f"{damaged[0]!r}: {self._reason(damaged[0])}. Remove them, or "
                "take another `backup_dir`, to start anew."
            )
        return None

    def _reason(self, name):
        path = storage.join(storage.join(self.path, name), "REASON")
        return storage.read(path).decode()

    def commit(
        self,
        step,
        parts,
        state,
        company: Company | None = None,
        did: Callable[[int], None] = at_once,
    ):
        """Writes a backup, and removes those that are too many after it.

        Args:
            step: Steps that the run has made.
            parts: Parts of tensors, each once: of this worker. Is empty in the
                end.
            state: JSON, of this worker.
            company: The workers that write it together, or None.
            did: See `committed.write_files`.

        Raises:
            OSError: If it cannot be written; those before are as they were.
        """
        try:
            self._commit(step, parts, state, company, did)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                "Each backup must be saved. Received: "
                f"{error}, after {step} steps, in {self.path!r}. The backups "
                "before are as they were. Free some room there, or make it "
                "writable, and start again."
            ) from error

    def _commit(self, step, parts, state, company, did):
        if company is None:
            path = committed.begin(self.path, step)
            contents = [committed.write_files(path, parts, state, did=did)]
            self._seal(path, step, contents)
            return
        path = company.from_first(
            f"folder/{step}", lambda: committed.begin(self.path, step)
        )
        contents = company.to_first(
            f"files/{step}",
            lambda: committed.write_files(
                path, parts, state, company.index, did
            ),
        )
        # Nobody ends before the backup is there, and worker 0 is the last one.
        company.from_first(
            f"sealed/{step}", lambda: self._seal(path, step, contents)
        )
        company.to_first(f"seen/{step}", lambda: True)

    def _seal(self, path, step, contents):
        committed.seal(path, step, contents)
        complete = [
            path
            for name in committed.begun(self.path)
            if committed.is_complete(path := storage.join(self.path, name))
        ]
        for path in complete[self._keep :]:
            committed.remove(path)

    def clear(self) -> None:
        """Removes all backups, those set aside too."""
        for name in storage.names(self.path):
            if name.startswith(("backup-", _DAMAGED)):
                committed.remove(storage.join(self.path, name))
