"""Work beside the training, spread over the time that there is for it.

at once   ████████................   each step of the training has one
paced     ...█..█..█..█..█..█..█..   processor less for a moment only
"""

import threading
import time

# Slower than any disk, so that training has the processors.
_BYTES_PER_SECOND = 64e6
_SECONDS = 0.1  # between two looks at whether the program is over


def at_once(num_bytes: int) -> None:
    """Does not rest; see `Pace.did`."""


class Pace:
    """Rests between pieces of work, so that they are spread evenly.

    Args:
        num_bytes: All that is to be done.
        seconds: In which it shall be done at the latest, if it can be.
        delay: Seconds before it begins.
        rests: Whether it rests at all after that: where training computes on
            the processors that do the work. Accelerators leave them free.
    """

    def __init__(
        self,
        num_bytes: int,
        seconds: float,
        delay: float = 0.0,
        *,
        rests: bool = True,
    ):
        self._seconds_per_byte = 0.0
        if rests:
            self._seconds_per_byte = min(
                1 / _BYTES_PER_SECOND, (seconds - delay) / max(num_bytes, 1)
            )
        self._start = time.monotonic() + delay
        self._done = 0
        self._is_waited_for = threading.Event()

    def hurry(self) -> None:
        """Rests no more: somebody waits."""
        self._is_waited_for.set()

    def begin(self) -> None:
        """Returns when the first piece may begin."""
        self.did(0)

    def did(self, num_bytes: int) -> None:
        """Is told of a piece of work; returns when the next one may begin."""
        self._done += num_bytes
        due = self._start + self._done * self._seconds_per_byte
        while (rest := due - time.monotonic()) > 0:
            # Python ends once all threads have; after an error in `fit` nobody
            # else says that it waits.
            is_over = not threading.main_thread().is_alive()
            if is_over or self._is_waited_for.wait(min(rest, _SECONDS)):
                return
