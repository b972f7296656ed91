"""Writes backups beside the training, one at a time; no failure is hidden.

The threads that write are kept for later fits: the C library gives each new
thread memory of its own, which a process of many fits never got back.
"""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable

_SECONDS = 0.1  # between two looks at whether the program is over
_idle: list[queue.SimpleQueue] = []  # of each thread that has no job
_under_way: set[threading.Event] = set()


class Writer:
    """Runs one job at a time in a thread."""

    def __init__(self):
        self._end: threading.Event | None = None
        self._error = None
        self._is_waited_for = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._end is not None and not self._end.is_set()

    def start(self, job: Callable[[], None], delay: float = 0.0) -> None:
        """Starts a job, after the one before has ended.

        Args:
            job: What is to be done.
            delay: Seconds before it begins, if nobody waits for it.

        Raises:
            Exception: What the job before raised.
        """
        self.wait()
        self._is_waited_for, self._end = threading.Event(), threading.Event()
        _under_way.add(self._end)
        begin = time.monotonic() + delay
        _jobs_of_a_thread().put((lambda: self._run(job, begin), self._end))

    def _run(self, job, begin):
        # Python ends once all threads have; after an error in `fit` nobody
        # else says that it waits.
        while (
            (rest := begin - time.monotonic()) > 0
            and threading.main_thread().is_alive()
            and not self._is_waited_for.wait(min(rest, _SECONDS))
        ):
            pass
        try:
            job()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raises what a job that has ended raised, once."""
        if not self.is_busy:
            self.wait()

    def join(self) -> None:
        """Returns once no job is under way, whatever became of it."""
        if self._end is not None:
            self._is_waited_for.set()
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
