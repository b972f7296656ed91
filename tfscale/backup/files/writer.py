"""Writes backups beside the training, one at a time; no failure is hidden.

One thread serves all fits: the C library gives each new thread memory of its
own, which a process of many fits never got back. Python ends after its jobs.
"""

import concurrent.futures
import os
from collections.abc import Callable

_thread = concurrent.futures.ThreadPoolExecutor(1, "backup")


class Writer:
    """Runs one job at a time in a thread."""

    def __init__(self):
        self._job: concurrent.futures.Future | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], None]) -> None:
        """Starts a job, after the one before has ended.

        Raises:
            Exception: What the job before raised.
        """
        self.wait()
        self._job = _thread.submit(job)

    def check(self) -> None:
        """Raises what a job that has ended raised, once."""
        if not self.is_busy:
            self.wait()

    def join(self) -> None:
        """Returns once no job is under way, and drops its error."""
        if self._job is not None:
            concurrent.futures.wait([self._job])
            self._job = None

    def wait(self) -> None:
        """Returns once no job is under way.

        Raises:
            Exception: What the job raised.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()


def finish() -> None:
    """Returns once no job is under way, of no writer."""
    _thread.submit(int).result()


def _forget():
    """A forked child has the thread of its parent no more."""
    global _thread
    _thread = concurrent.futures.ThreadPoolExecutor(1, "backup")


os.register_at_fork(after_in_child=_forget)
