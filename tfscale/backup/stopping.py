"""A signal that asks a run to stop: the run saves and ends.

It is for the process that runs `fit`. Its forked children, such as a pool of
processes that load data, have the earlier handlers: they must end at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence

# Those with handlers, in the order in which they were set.
_watching: "list[StopSignals]" = []


class StopSignals:
    """Notes the first signal; the second one ends the process at once.

    Args:
        signals: Numbers of signals; handlers are set in the main thread only,
            where Python allows it.
        is_over: Whether the run has ended, if by an error: signals then go to
            the earlier handlers.
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
            _watching.append(self)

    def _note(self, number, frame):
        if self._is_over():
            self.restore()
            os.kill(os.getpid(), number)
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received = number

    def restore(self) -> None:
        """Restores the earlier handlers; may be called again."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
        if self in _watching:
            _watching.remove(self)

    def pass_on(self, exit_code: int) -> None:
        """Passes a signal that came too late on to the earlier handler.

        Returns if that handler does.

        Raises:
            SystemExit: If there was no handler.
        """
        self.restore()
        number, self.received = self.received or self._signals[0], None
        if signal.getsignal(number) in (signal.SIG_DFL, None):
            sys.exit(exit_code)
        os.kill(os.getpid(), number)


def _restore_in_child():
    for signals in reversed(_watching):
        signals.restore()


# Python cannot undo this; without a `fit` it does nothing.
os.register_at_fork(after_in_child=_restore_in_child)
