"""Tells workers at once, in words, that one of them is gone.

TensorFlow notices after seven seconds, with a traceback of pages. Here each
worker has a connection with worker 0, which the kernel closes when either ends;
worker 0 informs the others:

    worker 0          worker 1          worker 2
       │  "bye 57" ◄─ ends, having met the others 57 times
       │                              ✗ killed, its connection closes
    says who       ◄── "lost c:2222"
                      says who

Within `naming_lost` an error of TensorFlow's by a lost worker becomes a
`ConnectionError` that names the worker. Elsewhere the name is the last line of
a program that ends so.

Only Python knows the exit code of a program. But a worker that ends, by
`sys.exit(3)` say, while others are in a 58th collective is missed: they say so,
and it does not wait for them.
"""

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.cluster.cluster import Cluster
from tfscale.cluster.coordinator import coordinator_of
from tfscale.cluster.rendezvous import Rendezvous

# TensorFlow's messages that a worker is gone.
_OF_LOSS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.UnavailableError,
)
# If all fail in the same way, each worker's own error is enough.
_SECONDS_TO_END_TOO = 1.0
# TensorFlow's connections may close before these, on a busy machine by seconds.
_SECONDS_TO_KNOW = 5.0
_SECONDS_BETWEEN_COUNTS = 0.2
_SECONDS_TO_ANSWER = 5.0  # Python stands still while TensorFlow connects
_HAS_ENDED = (
    "has ended while others wait for it (it exited, or they called something "
    "that needs all workers, such as `evaluate`, and it did not)"
)
_STOOD_STILL = "(this one) stood still for so long that the others have ended"
_DOES_NOT_ANSWER = (
    "does not answer any more (it stands still, or its machine or the network)"
)
# TensorFlow's message that a task with open connections stands still.
_TASK = r"/job:(\w+)/replica:\d+/task:(\d+)"
_SILENT = r"stopped sending heartbeats\):\n((?:/job:\S+\n)+)"
# The service of worker 0.
_SERVICE = "/tensorflow.CoordinationService/"
# TensorFlow says that shapes or dtypes of a "collective instance" differ.
_DIFFERENT = (
    "All workers must do the same things in the same order. Received: tensors "
    "of different steps, because a worker has moved on to something else. If "
    "a callback ends `fit` or an epoch (`stop_training`), it must do so in "
    "all workers; calls of `fit`, `evaluate` and `predict` must be the same "
    "in all of them, too."
)


class FailureDetector:
    """Notices when another worker is lost.

    Attributes:
        is_missed: Set once another worker waits for this one, which has ended.
        num_collectives: Returns how many exchanges of all workers this one has
            begun.
    """

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous):
        self._cluster = cluster
        self._rendezvous = rendezvous
        self.is_missed = threading.Event()
        self.num_collectives: Callable[[], int] = int
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._lost: list[tuple[str, str]] = []
        self._knows = threading.Event()
        # When others have answered, and how many collectives they had begun.
        self._answered: dict[str, tuple[float, int]] = {}
        self._have_ended: set[str] = set()
        rendezvous.listen(self._note_end, self._hear)

    def leave(self) -> None:
        """Tells the others that this worker ends, well or by an error.

        Called by `atexit`, when Python has printed the error.
        """
        error = getattr(sys, "last_value", None)
        if error is None:
            self._ends.set()
            self._rendezvous.tell(f"bye {self.num_collectives()}")
            return
        words = self._explanation(error)
        self._ends.set()
        if words is not None:
            print(words, file=sys.stderr, flush=True)

    def check_all_there(self) -> None:
        """Raises a `ConnectionError` if a worker is gone; says which."""
        if self._lost:
            raise ConnectionError(self._words())

    def silent(self) -> list[str]:
        """Those with a connection to this worker that do not answer now."""
        asked = time.monotonic()
        self._rendezvous.tell("ask")
        while True:
            found = [
                address
                for address in self._rendezvous.connections
                if self._answered.get(address, (0.0, 0))[0] < asked
            ]
            if not found or time.monotonic() > asked + _SECONDS_TO_ANSWER:
                return found
            time.sleep(0.02)

    def is_awaited_by(self, address: str) -> bool:
        """Whether a worker has begun as many exchanges as this one.

        If it has not begun the last one of this worker, it has begun another
        one, and waits for this worker. It is asked each time; its answer counts
        in later calls.
        """
        self._rendezvous.tell_one(address, "ask")
        _, begun = self._answered.get(address, (0.0, -1))
        return begun >= self.num_collectives()

    @contextlib.contextmanager
    def joining(self, timeout: float) -> Iterator[None]:
        """Within it TensorFlow connects all workers, or gives up in time.

        Raises:
            ConnectionError: If it gives up; says who does not answer.
        """
        try:
            yield
        except (tf.errors.OpError, RuntimeError) as error:
            for address in self.silent():
                self._tell_lost(address, _DOES_NOT_ANSWER)
            # Worker 0 asks all, and tells the others.
            self._knows.wait(_SECONDS_TO_KNOW)
            self.check_all_there()
            first_line = str(error).splitlines()[0][:200]
            raise ConnectionError(
                "Every worker must be able to reach the ports of all others. "
                f"Received: after {timeout:g} s, at {self._cluster.address}, "
                "TensorFlow has not connected "
                f"{', '.join(self._cluster.addresses)}, though all of them "
                f"answer ({first_line}). Check for a firewall, or for a name "
                "with several addresses."
            ) from None

    def _hear(self, address, line):
        word, _, found = line.partition(" ")
        if word == "ask":
            here = f"here {self.num_collectives()}"
            self._rendezvous.tell_one(address, here)
        elif word == "here":
            self._answered[address] = time.monotonic(), int(found)
        elif word == "lost":
            self._note(found)
        elif word == "bye":
            self._have_ended.add(address)
            if self._is_awaited(int(found)):
                self._note(address, _HAS_ENDED)

    def _note_end(self, address, machine_answers):
        if not (machine_answers and address in self._have_ended):
            self._note(address)

    def _is_awaited(self, num_collectives):
        """Whether this worker waits for one that has ended."""
        while not self._ends.wait(_SECONDS_BETWEEN_COUNTS):
            if self.num_collectives() > num_collectives:
                return True
        return False

    def _note(self, address, how="is gone"):
        if address == self._cluster.address:
            self.is_missed.set()
            how = _STOOD_STILL
        is_first = self._tell_lost(address, how)
        if not is_first or self._ends.wait(_SECONDS_TO_END_TOO):
            return
        if self.num_collectives():
            # Collectives would wait for the lost worker for several seconds.
            attributes.abort_collectives(self._words())
            if self._ends.wait(_SECONDS_TO_END_TOO):
                return
        logging.error(self._words())

    def _tell_lost(self, address, how):
        """Tells the others once; returns whether it is the first loss."""
        with self._lock:
            if address in dict(self._lost):
                return False
            self._lost.append((address, how))
        self._rendezvous.tell(f"lost {address}")
        self._knows.set()  # After that: this process may end now.
        return len(self._lost) == 1

    def _note_silent(self, error):
        """Notes the workers that an error of TensorFlow calls silent."""
        silent = [
            self._cluster.jobs[job][int(index)]
            for tasks in re.findall(_SILENT, error)
            for job, index in re.findall(_TASK, tasks)
        ]
        if _SERVICE in error:
            silent.append(coordinator_of(self._cluster))
        for address in silent:
            if address != self._cluster.address:
                self._tell_lost(address, _DOES_NOT_ANSWER)

    def _words(self):
        lost, how = self._lost[0]
        name = next(
            f"{job} {addresses.index(lost)}"
            for job, addresses in self._cluster.jobs.items()
            if lost in addresses
        )
        return (
            f"All workers must run until all have ended. Received: {name} at "
            f"{lost} {how}. See its last output. Start all of them again, as "
            "`python -m tfscale.launch --max_restarts` does; with "
            "`tfscale.callbacks.BackupAndRestore` they continue from the last "
            "backup."
        )

    @contextlib.contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Within it, an error of TensorFlow's names the worker that is lost.

        Raises:
            ConnectionError: In place of the error, if a worker is lost.
            ValueError: In place of it, if workers do different things.
        """
        try:
            yield
        except tf.errors.OpError as error:
            words = self._explanation(error)
            if words is None:
                raise
            kind = ValueError if words == _DIFFERENT else ConnectionError
            raise kind(words) from None

    def _explanation(self, error):
        """The cause of an error in a line, if it comes from other workers."""
        if not isinstance(error, tf.errors.OpError):
            return None
        if "ollective instance" in str(error):
            return _DIFFERENT
        if not (isinstance(error, _OF_LOSS) or _SERVICE in str(error)):
            return None
        if not self._knows.wait(_SECONDS_TO_KNOW):
            self._note_silent(str(error))
        return self._words() if self._lost else None
