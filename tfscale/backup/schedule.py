"""When to save: each epoch, every few steps, or as often as it is cheap."""

import math
import time

# A choice: before a save has shown what it costs.
_SECONDS_BEFORE_THE_FIRST = 60.0


class SaveSchedule:
    """Says whether a save is due.

    With "auto" a save is due once the one before, from its beginning to its
    last byte, has taken no more than a share of the time since it began
    (CheckFreq: Mohan et al., FAST 2021, section 4.3). Steps during a save are
    longer by no more than its time, so this bounds the cost. Otherwise
    `save_freq` is "epoch" or a number of steps.
    """

    def __init__(self, save_freq: str | int, overhead: float):
        self._save_freq = save_freq
        self._overhead = overhead
        self._num_steps = 0  # since the last save
        self._due_at = time.monotonic() + _SECONDS_BEFORE_THE_FIRST

    @property
    def is_timed(self) -> bool:
        """Whether it depends on a clock, and not only on steps."""
        return self._save_freq == "auto"

    def steps_ended(self, count: int) -> None:
        """Called after each execution, of `count` steps."""
        self._num_steps += count

    def is_due(self, is_first: bool) -> bool:
        """Whether to save now; `is_first` if an epoch begins."""
        if not self._num_steps:
            return False
        if not isinstance(self._save_freq, str):
            return self._num_steps >= self._save_freq
        return time.monotonic() >= self._due_at if self.is_timed else is_first

    def save_begins(self) -> None:
        """Called at the beginning of a save."""
        self._num_steps = 0
        self._began_at = time.monotonic()
        self._due_at = math.inf

    def save_ended(self) -> None:
        """Called when a save is complete; in any thread."""
        seconds = time.monotonic() - self._began_at
        self._due_at = self._began_at + seconds / self._overhead
