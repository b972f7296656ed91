"""Writes backups beside the training, one at a time; no failure is hidden.

The threads that write are kept for later fits: the C library gives each new
thread memory of its own, which a process of many fits never got back.
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable

from tfscale.backup.files.pace import Pace

_idle: list[queue.SimpleQueue] = []  # of each thread that has no job
_under_way: set[threading.Event] = set()


class Writer:
    """Runs one job at a time in a thread, at a pace."""

    def __init__(self):
        self._end: threading.Event | None = None
        self._error = None
        self._pace: Pace | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._end is not None and not self._end.is_set()

    def start(self, job: Callable[[], None], pace: Pace) -> None:
        """Starts a job, after the one before has ended.

        Args:
            job: What is to be done.
            pace: At which the job works; it hurries once it is waited for.

        Raises:
            Exception: What the job before raised.
        """
        self.wait()
        self._pace, self._end = pace, threading.Event()
        _under_way.add(self._end)
        _jobs_of_a_thread().put((lambda: self._run(job, pace), self._end))

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
        if self._end is not None and self._pace is not None:
            self._pace.hurry()
            self._end.wait()
            self._end = None

    def wait(self) -> None:
        """Returns once no job is under way.

        Raises:
            Exception: What the job raised.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _jobs_of_a_thread():
    """The jobs of a thread that has none, or of a new one."""
    if _idle:
        return _idle.pop()
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(
        target=_work, args=(jobs,), name="backup", daemon=True
    ).start()
    return jobs


def _work(jobs):
    while True:
        job, end = jobs.get()
        job()
        _idle.append(jobs)
        _under_way.discard(end)
        end.set()
        del job, end  # and what they hold, while there is none


def finish() -> None:
    """Returns once no job is under way, of no writer."""
    for end in list(_under_way):
        end.wait()


def _forget():
    """A forked child has the threads of its parent no more."""
    _idle.clear()
    _under_way.clear()


# A thread that is kept must be a daemon, or no program would end.
atexit.register(finish)
os.register_at_fork(after_in_child=_forget)
