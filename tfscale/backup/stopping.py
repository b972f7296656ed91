"""A signal that asks a run to stop: the run saves and ends.

It is for the process that runs `fit`. In its forked children, such as a pool of
processes that load data, the earlier handlers get each signal: children must
end at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence


class StopSignals:
    """Notes the first signal; the earlier handlers get the second one.

    Without a handler it ends the process at once, whatever that does.

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
        self._process = os.getpid()
        self.received = None

    def watch(self) -> None:
        """Sets the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number, frame):
        is_child = os.getpid() != self._process
        if is_child or self.received is not None or self._is_over():
            self.restore()
            os.kill(os.getpid(), number)
        else:
            self.received = number

    def restore(self) -> None:
        """Restores the earlier handlers; may be called again."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

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
