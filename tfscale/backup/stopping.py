"""A signal that asks a run to stop: it is noted, and the run saves and ends."""

import os
import signal
import threading
from collections.abc import Callable
from collections.abc import Sequence


class StopSignals:
    """Notes the first signal; the second one ends the process at once.

    Args:
        signals: Numbers of signals; handlers are set in the main thread only,
            where Python allows it.
        is_over: Whether the run has ended, if by an error: signals are then
            for whom they were for before.
    """

    def __init__(self, signals: Sequence[int], is_over: Callable[[], bool]):
        self._signals = tuple(signals)
        self._is_over = is_over
        self._before = {}
        self.received = None

    def watch(self) -> None:
        """Sets the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number, frame):
        if self._is_over():
            self.restore()
            os.kill(os.getpid(), number)
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received = number

    def restore(self) -> None:
        """Puts the handlers back that were there before; once is enough."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
