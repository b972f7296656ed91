"""The costs of interruptions and saves of a run, over all of its processes."""

import contextlib
import os
import time
from typing import Any

_DIGITS = 16


class Report:
    """Adds up times and steps; is saved with the run.

        step_begins ─► step ─► step_ended ─► other callbacks ─► step_is_over
        ├──────────────────── a step's time ───────────────────────────────┤

    A step on an accelerator returns at once: callbacks wait for its end. The
    last step of an epoch is over when it has ended.

    Args:
        path: The file that gets a note of the number of steps, so that a kill
            does not lose it; None in workers and stores without it.
    """

    def __init__(self, path: str | None):
        self._totals = {
            "began": time.time(),
            "interruptions": 0,
            "steps_lost": 0,
            "num_saves": 0,
            "save_seconds": 0.0,
            "useful_seconds": 0.0,
        }
        self._began_at = self._ended_at = 0.0
        self._num_running = 0  # steps that are not over
        # Without the first execution, which traces.
        self._timed_steps, self._timed_seconds = -1, 0.0
        self._path = path
        self._has_written = False

    def end(self) -> None:
        """Removes the note: no step was lost."""
        if self._has_written and self._path is not None:
            with contextlib.suppress(OSError):
                os.remove(self._path)

    @property
    def state(self) -> dict[str, Any]:
        """The totals: JSON."""
        return dict(self._totals)

    @property
    def seconds_per_step(self) -> float:
        """The mean in this process, 0 if it is not known."""
        return self._timed_seconds / max(self._timed_steps, 1)

    def resume(self, state: dict[str, Any], steps: int) -> None:
        """Continues the report that an earlier process saved after `steps`."""
        self._totals = dict(state)
        self._totals["interruptions"] += 1
        self._totals["steps_lost"] += max(self.noted() - steps, 0)

    def noted(self) -> int:
        """The steps that an earlier process has noted; 0 if none is known."""
        try:
            with self._opened_note() as note:
                return int(os.pread(note, _DIGITS, 0) or 0)
        except (OSError, ValueError):
            return 0

    @contextlib.contextmanager
    def _opened_note(self, flags=0):
        if self._path is None:
            raise FileNotFoundError("There is no note of steps.")
        note = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o644)
        try:
            yield note
        finally:
            os.close(note)

    def step_begins(self) -> None:
        """Called right before a step."""
        self._began_at = time.monotonic()

    def step_ended(self, count: int, total: int) -> None:
        """Notes a step of `count` batches, the last of `total` of the run."""
        self._ended_at = time.monotonic()
        self._num_running = count
        # A note that fails only makes the report less exact.
        with (
            contextlib.suppress(OSError),
            self._opened_note(os.O_CREAT) as note,
        ):
            os.pwrite(note, f"{total:0{_DIGITS}d}".encode(), 0)
            self._has_written = True

    def step_is_over(self, is_last: bool) -> None:
        """Called before a save or a step; `is_last` in its epoch."""
        if not self._num_running:
            return
        end = self._ended_at if is_last else time.monotonic()
        seconds = end - self._began_at
        self._totals["useful_seconds"] += seconds
        if self._timed_steps < 0:
            self._timed_steps = 0
        else:
            self._timed_steps += self._num_running
            self._timed_seconds += seconds
        self._num_running = 0

    def saved(self, seconds: float) -> None:
        """Adds a save that delayed training by `seconds`."""
        self._totals["num_saves"] += 1
        self._totals["save_seconds"] += seconds

    def text(self) -> str:
        """The report as one line."""
        totals = self._totals
        wall = max(time.time() - totals["began"], 1e-9)
        return (
            f"{totals['interruptions']} interruptions, "
            f"{totals['steps_lost']} steps lost, {totals['num_saves']} saves "
            f"that took {totals['save_seconds']:.2f} s of the steps' time, "
            f"goodput {min(totals['useful_seconds'] / wall, 1.0):.1%}"
        )
