"""Writes backups beside the training, one at a time; no failure is hidden."""

import threading
import time
from collections.abc import Callable


class Writer:
    """Runs one job at a time in a thread of its own.

    Attributes:
        seconds: How long the last job took.
    """

    def __init__(self):
        self._thread = None
        self._error = None
        self.seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Starts a job, after the one before has ended.

        Raises:
            Exception: What the job before raised.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="backup"
        )
        self._thread.start()

    def _run(self, job):
        start = time.monotonic()
        try:
            job()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - start

    def check(self) -> None:
        """Raises what a job that has ended raised, once."""
        if not self.is_busy:
            self.wait()

    def join(self) -> None:
        """Returns once no job is under way, whatever became of it."""
        if self._thread is not None:
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
