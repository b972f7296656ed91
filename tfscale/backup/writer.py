"""Writes backups beside the training, one at a time; no failure is hidden."""

import threading
from collections.abc import Callable

from tfscale.backup.pace import Pace


class Writer:
    """Runs one job at a time in a thread of its own, at a pace."""

    def __init__(self):
        self._thread = None
        self._error = None
        self._pace: Pace | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], pace: Pace) -> None:
        """Starts a job, after the one before has ended.

        Args:
            job: What is to be done.
            pace: At which the job works; it hurries once it is waited for.

        Raises:
            Exception: What the job before raised.
        """
        self.wait()
        self._pace = pace
        self._thread = threading.Thread(
            target=self._run, args=(job, pace), name="backup"
        )
        self._thread.start()

    def _run(self, job, pace):
        try:
            pace.begin()
            job()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raises what a job that has ended raised, once."""
        if not self.is_busy:
            self.wait()

    def join(self) -> None:
        """Returns once no job is under way, whatever became of it."""
        if self._thread is not None and self._pace is not None:
            self._pace.hurry()
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Returns once no job is under way.

        Raises:
            Exception: What the job raised.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
