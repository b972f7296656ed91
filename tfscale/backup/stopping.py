"""A signal that asks a run to stop: it is noted, and the run saves and ends.

It is for the process that runs `fit`. What that one forks, such as a pool of
processes that load data, has the handlers of before: it must end when it is
told to.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence

# Those whose handlers are set, the last ones last.
_watching: "list[StopSignals]" = []


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
        """Puts the handlers back that were there before; once is enough."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
        if self in _watching:
            _watching.remove(self)

    def pass_on(self, exit_code: int) -> None:
        """Hands a signal on that came too late for the run to stop.

        The handler of before gets it; returns if that one does.

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


# Python cannot take this back; where no `fit` runs it does nothing.
os.register_at_fork(after_in_child=_restore_in_child)
