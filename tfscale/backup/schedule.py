"""When to save: each epoch, each so many steps, or as often as it is cheap."""

import math
import time

# Before the first save has shown how long one takes.
_SECONDS_BEFORE_THE_FIRST = 60.0


class SaveSchedule:
    """Says whether a save is due.

    With "auto" a save is due as soon as the one before, from its beginning to
    its last byte, has taken no more than a share of the time since it began
    (CheckFreq: Mohan et al., FAST 2021, section 4.3). Steps beside a save are
    longer by no more than the time it takes, so this is a bound of its cost.

    Args:
        save_freq: "epoch", "auto" or a number of steps.
        overhead: With "auto", the share of the time that saves may take.
    """

    def __init__(self, save_freq: str | int, overhead: float):
        self._save_freq = save_freq
        self._overhead = overhead
        self._num_steps = 0  # since the last save
        self._due_at = time.monotonic() + _SECONDS_BEFORE_THE_FIRST

    @property
    def is_timed(self) -> bool:
        """Whether it goes by a clock, and not only by steps."""
        return self._save_freq == "auto"

    def steps_ended(self, count: int) -> None:
        """Is called after each execution, of so many steps."""
        self._num_steps += count

    def is_due(self, is_first: bool) -> bool:
        """Whether to save now; `is_first` where an epoch begins."""
        if not self._num_steps:
            return False
        if not isinstance(self._save_freq, str):
            return self._num_steps >= self._save_freq
        return time.monotonic() >= self._due_at if self.is_timed else is_first

    def save_begins(self) -> None:
        """Is called at the beginning of a save."""
        self._num_steps = 0
        self._began_at = time.monotonic()
        self._due_at = math.inf

    def save_ended(self) -> None:
        """Is called when a save is complete; in any thread."""
        seconds = time.monotonic() - self._began_at
        self._due_at = self._began_at + seconds / self._overhead
