"""When to save: each epoch, each so many steps, or as often as it is cheap."""

import time

_FIRST_AUTO_STEPS = 10


class SaveSchedule:
    """Says whether a save is due, from steps and what saves have cost.

    With "auto" the steps between two saves are those in which the time that a
    save holds training up stays under a share of them (CheckFreq: Mohan et
    al., FAST 2021, section 4.3); both are measured as training goes.

    Args:
        save_freq: "epoch", "auto" or a number of steps.
        overhead: With "auto", the share of the time that saves may take.

    Attributes:
        useful_seconds: All steps together.
        interval: With "auto", steps between two saves.
    """

    def __init__(self, save_freq: str | int, overhead: float):
        self._save_freq = save_freq
        self._overhead = overhead
        self._steps = 0  # since the last save
        self._timed_steps = 0
        self._timed_seconds = 0.0
        self._begin = 0.0
        self._is_warm = False
        self.useful_seconds = 0.0
        self.interval = _FIRST_AUTO_STEPS

    @property
    def seconds_per_step(self) -> float:
        """The mean so far; without the first step, which traces."""
        return self._timed_seconds / max(self._timed_steps, 1)

    def step_begins(self) -> None:
        """Is called right before a step."""
        self._begin = time.monotonic()

    def step_ended(self, count: int) -> None:
        """Is called right after a step, of so many batches."""
        seconds = time.monotonic() - self._begin
        self._steps += count
        self.useful_seconds += seconds
        if self._is_warm:
            self._timed_seconds += seconds
            self._timed_steps += count
        self._is_warm = True

    def is_due(self, is_first: bool) -> bool:
        """Whether to save now.

        Args:
            is_first: Whether an epoch begins.
        """
        if not self._steps:
            return False
        if self._save_freq == "epoch":
            return is_first
        if isinstance(self._save_freq, str):  # "auto"
            return self._steps >= self.interval
        return self._steps >= self._save_freq

    def saved(self, stall: float) -> None:
        """A save was made, which held training up for `stall` seconds."""
        self._steps = 0
        if self._timed_steps:
            per_step = max(self.seconds_per_step, 1e-9)
            self.interval = max(int(stall / self._overhead / per_step) + 1, 1)
