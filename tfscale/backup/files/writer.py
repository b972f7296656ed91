"""Writes backups beside the training, one at a time; no failure is hidden.

One thread serves all fits: the C library never returns the memory that it gives
to each new thread. Python ends after the thread's jobs.
"""

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable


@functools.cache
def _thread(process: int) -> concurrent.futures.ThreadPoolExecutor:
    """The thread of a process; a forked child needs one for itself."""
    del process
    return concurrent.futures.ThreadPoolExecutor(1, "backup")


class Writer:
    """Runs one job at a time in a thread."""

    def __init__(self):
        self._job: concurrent.futures.Future | None = None
        self._is_waited_for = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], None], delay: float = 0.0) -> None:
        """Starts a job `delay` seconds from now, or once it is waited for."""
        self.wait()
        self._is_waited_for.clear()

        def delayed():
            self._is_waited_for.wait(delay)
            job()

        self._job = _thread(os.getpid()).submit(delayed)

    def check(self) -> None:
        """Raises the error of a job that has ended, once."""
        if not self.is_busy:
            self.wait()

    def join(self) -> None:
        """Returns once no job is under way, and drops its error."""
        with contextlib.suppress(Exception):
            self.wait()

    def wait(self) -> None:
        """Returns once no job is under way, or raises its error."""
        self._is_waited_for.set()
        job, self._job = self._job, None
        if job is not None:
            job.result()
