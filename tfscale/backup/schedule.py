"""When to save: each epoch, each so many steps, or as often as it is cheap."""

import collections
import statistics
import time

_MIN_USUAL_STEPS = 10
_NUM_USUAL_STEPS = 50
# What slower steps cost is known by a clock that others disturb, as often too
# low as too high; and the share is a limit.
_MARGIN = 1.1
# What a first save is taken to cost, until one was made: training on all cores
# is held up for about the time of writing, which is 60 to 150 MB/s on a disk.
_BYTES_PER_SECOND = 100e6


class SaveSchedule:
    """Says whether a save is due, from steps and what saves have cost.

    With "auto" a save is due as soon as it would leave the cost of all saves
    under a share of the time of all steps (CheckFreq: Mohan et al., FAST 2021,
    section 4.3). A save costs the time for which it holds training up, and that
    by which steps are longer than the median of those before and after while it
    is written beside them. What the first one costs is not known, and reckoned
    from the size of the state.

        step_begins ─► step ─► step_ended ─► other callbacks ─► is_over
        ├──────────────────── a step's time ──────────────────┤

    A step has other callbacks behind it: on an accelerator it is there that its
    end is waited for. The last one of an epoch is over when it has ended.

    Args:
        save_freq: "epoch", "auto" or a number of steps.
        overhead: With "auto", the share of the time that saves may take.

    Attributes:
        useful_seconds: All steps that are over, together.
    """

    def __init__(self, save_freq: str | int, overhead: float):
        self._save_freq = save_freq
        self._overhead = overhead
        self._steps_since_save = 0
        self._began_at = self._ended_at = 0.0
        self._batches = 0  # of the step that has ended
        self._is_writing = False
        self._first_seconds: float | None = None  # of the step that traces
        self.useful_seconds = 0.0
        # Of a batch, beside which nothing was written; and how many steps of
        # those came after a save was written.
        self._usual = collections.deque(maxlen=_NUM_USUAL_STEPS)
        self._num_after = 0
        # Of steps beside which something was written, with their batches.
        self._disturbed: list[tuple[float, int]] = []
        self._num_saves = 0
        self._stall = 0.0  # of all saves, and of the steps beside them
        self._slowdown = 0.0
        self._expected_cost: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it goes by a clock, and not only by steps."""
        return self._save_freq == "auto"

    @property
    def seconds_per_step(self) -> float:
        """The mean of late; without the first step, which traces."""
        return statistics.fmean(self._usual or [0.0])

    @property
    def expects_size(self) -> bool:
        """Whether it has to know the size of the state."""
        return self.is_timed and self._expected_cost is None

    def expect(self, num_bytes: int) -> None:
        """Is told the size of the state."""
        self._expected_cost = num_bytes / _BYTES_PER_SECOND

    def step_begins(self, is_writing: bool) -> None:
        """Is called right before a step.

        Args:
            is_writing: Whether a backup is being written.
        """
        self._began_at = time.monotonic()
        self._is_writing = is_writing

    def step_ended(self, count: int) -> None:
        """Is called right after a step, of so many batches."""
        self._ended_at = time.monotonic()
        self._batches = count

    def step_is_over(self, is_last: bool) -> None:
        """Is called before a save, and before the next step.

        Args:
            is_last: Whether the step was the last one of an epoch, and was over
                when it ended.
        """
        count, self._batches = self._batches, 0
        if not count:
            return
        end = self._ended_at if is_last else time.monotonic()
        seconds = end - self._began_at
        self._steps_since_save += count
        self.useful_seconds += seconds
        if self._first_seconds is None:
            self._first_seconds = seconds
        elif self._is_writing:
            self._disturbed.append((seconds, count))
        else:
            self._usual.append(seconds / count)
            self._num_after += 1
            if self._disturbed and self._num_after >= _MIN_USUAL_STEPS:
                usual = statistics.median(self._usual)
                more = sum(s - usual * n for s, n in self._disturbed)
                self._slowdown += max(more, 0.0)
                self._disturbed = []

    def is_due(self, is_first: bool) -> bool:
        """Whether to save now.

        Args:
            is_first: Whether an epoch begins.
        """
        if not self._steps_since_save:
            return False
        if self._save_freq == "epoch":
            return is_first
        if not isinstance(self._save_freq, str):
            return self._steps_since_save >= self._save_freq
        if self._is_writing or self._disturbed:
            return False  # what that costs is not known yet
        if not self._num_saves and self._steps_since_save < _MIN_USUAL_STEPS:
            return False
        undisturbed = self.useful_seconds - (self._first_seconds or 0.0)
        undisturbed -= self._slowdown
        return self._cost_with_one_more() <= self._overhead * undisturbed

    def _cost_with_one_more(self):
        if not self._num_saves:
            return self._expected_cost or 0.0
        cost = self._stall + self._slowdown
        return _MARGIN * cost * (1 + 1 / self._num_saves)

    def saved(self, stall: float) -> None:
        """A save was made, which held training up for `stall` seconds."""
        self._steps_since_save = self._num_after = 0
        self._num_saves += 1
        self._stall += stall
