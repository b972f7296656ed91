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
        self._steps = 0  # since the last save
        self._usual = collections.deque(maxlen=_NUM_USUAL_STEPS)
        self._plain_seconds = 0.0  # of steps beside which nothing was written
        self._plain_steps = 0
        self._undisturbed_seconds = 0.0  # of steps, less what saves have cost
        self._num_saves = 0
        self._cost = 0.0
        self._beside_seconds = 0.0  # of steps while it is written
        self._beside_steps = 0
        self._after = 0  # how many came then
        self._expected_cost: float | None = None
        self._begin = 0.0
        self._end = 0.0
        self._count = 0  # batches of the step that has ended
        self._is_warm = False
        self._is_writing = False
        self.useful_seconds = 0.0

    @property
    def is_timed(self) -> bool:
        """Whether it goes by a clock, and not only by steps."""
        return self._save_freq == "auto"

    @property
    def seconds_per_step(self) -> float:
        """The mean so far; without the first step, which traces."""
        return self._plain_seconds / max(self._plain_steps, 1)

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
        self._begin = time.monotonic()
        self._is_writing = is_writing

    def step_ended(self, count: int) -> None:
        """Is called right after a step, of so many batches."""
        self._end = time.monotonic()
        self._count = count

    def step_is_over(self, is_last: bool) -> None:
        """Is called before a save, and before the next step.

        Args:
            is_last: Whether the step was the last one of an epoch, and was over
                when it ended.
        """
        count, self._count = self._count, 0
        if not count:
            return
        if not is_last:
            self._end = time.monotonic()
        seconds = self._end - self._begin
        self._steps += count
        self.useful_seconds += seconds
        if not self._is_warm:
            self._is_warm = True
            return
        if self._is_writing:
            self._beside_seconds += seconds
            self._beside_steps += count
            return
        self._undisturbed_seconds += seconds
        self._plain_seconds += seconds
        self._plain_steps += count
        self._usual.append(seconds / count)
        self._after += 1
        if self._beside_steps and self._after >= _MIN_USUAL_STEPS:
            usual = self._beside_steps * statistics.median(self._usual)
            self._cost += max(self._beside_seconds - usual, 0.0)
            self._undisturbed_seconds += usual
            self._beside_seconds, self._beside_steps = 0.0, 0

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
            if self._is_writing or self._beside_steps:
                return False  # what that costs is not known yet
            if self._num_saves:
                each = self._cost / self._num_saves
                with_one_more = _MARGIN * (self._cost + each)
            elif self._steps < _MIN_USUAL_STEPS:
                return False
            else:
                with_one_more = self._expected_cost or 0.0
            return with_one_more <= self._overhead * self._undisturbed_seconds
        return self._steps >= self._save_freq

    def saved(self, stall: float) -> None:
        """A save was made, which held training up for `stall` seconds."""
        self._steps = self._after = 0
        self._num_saves += 1
        self._cost += stall
