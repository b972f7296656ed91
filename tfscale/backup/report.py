"""What interruptions and saves have cost a run, over all of its processes."""

import contextlib
import os
import time
import weakref
from typing import Any

from tfscale.backup.files.storage import storage_of

_DIGITS = 16


class Report:
    """Adds up times and steps; is saved with the run.

        step_begins ─► step ─► step_ended ─► other callbacks ─► step_is_over
        ├──────────────────── a step's time ───────────────────────────────┤

    A step on an accelerator returns at once: callbacks wait for its end. The
    last one of an epoch is over when it has ended.

    Args:
        folder: The folder of the backups; the step that training has come to
            is noted there, so that a kill does not lose it. None in workers
            that do not.
    """

    def __init__(self, folder: str | None):
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
        self._note: int | None = None
        self._path = storage_of(folder).progress_file() if folder else None
        self._open()

    def _open(self):
        """Nothing but the report needs the file, so no failure counts."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._note = os.open(self._path, flags, 0o644)
            self._close = weakref.finalize(self, os.close, self._note)

    def close(self) -> None:
        """Closes the note of steps."""
        if self._note is not None:
            self._close()
            self._note = None

    def end(self) -> None:
        """Removes the note: nothing was lost."""
        if self._note is not None and self._path is not None:
            with contextlib.suppress(OSError):
                os.remove(self._path)
        self.close()

    @property
    def state(self) -> dict[str, Any]:
        """The totals: JSON."""
        return dict(self._totals)

    @property
    def seconds_per_step(self) -> float:
        """The mean in this process, 0 if it is not known."""
        return self._timed_seconds / max(self._timed_steps, 1)

    def resume(self, state: dict[str, Any], steps: int) -> None:
        """Goes on from what an earlier process had saved after `steps`."""
        self._totals = dict(state)
        self._totals["interruptions"] += 1
        self._totals["steps_lost"] += max(self.noted() - steps, 0)

    def noted(self) -> int:
        """The steps that an earlier process has noted; 0 if none is known."""
        if self._note is None:
            return 0
        try:
            return int(os.pread(self._note, _DIGITS, 0) or 0)
        except (OSError, ValueError):
            return 0

    def step_begins(self) -> None:
        """Is called right before a step."""
        self._began_at = time.monotonic()

    def step_ended(self, count: int, total: int) -> None:
        """Notes a step of `count` batches, the last of `total` of the run."""
        self._ended_at = time.monotonic()
        self._num_running = count
        with contextlib.suppress(OSError):
            if self._note is not None and not os.fstat(self._note).st_nlink:
                self.close()  # the folder was removed
            if self._note is None:
                self._open()
            if self._note is not None:
                os.pwrite(self._note, f"{total:0{_DIGITS}d}".encode(), 0)

    def step_is_over(self, is_last: bool) -> None:
        """Is called before a save or a step; `is_last` in its epoch."""
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
        """A save held training up for so long."""
        self._totals["num_saves"] += 1
        self._totals["save_seconds"] += seconds

    def text(self) -> str:
        """One line for people."""
        totals = self._totals
        wall = max(time.time() - totals["began"], 1e-9)
        return (
            f"{totals['interruptions']} interruptions, "
            f"{totals['steps_lost']} steps lost, {totals['num_saves']} saves "
            f"that took {totals['save_seconds']:.2f} s of the steps' time, "
            f"goodput {min(totals['useful_seconds'] / wall, 1.0):.1%}"
        )
