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
        """Closes what it notes steps in."""
        if self._note is not None:
            self._close()
            self._note = None

    def end(self) -> None:
        """Removes the note: nothing was lost."""
        if self._note is not None and self._path is not None:
            with contextlib.suppress(OSError):
                os.remove(self._path)
        self.close()

    def state(self, useful_seconds: float) -> dict[str, Any]:
        """The totals, with the time of steps of this process added."""
        useful = self._totals["useful_seconds"] + useful_seconds
        return {**self._totals, "useful_seconds": useful}

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

    def step(self, steps: int) -> None:
        """Notes how many steps the run has made."""
        with contextlib.suppress(OSError):
            if self._note is not None and not os.fstat(self._note).st_nlink:
                self.close()  # the folder was removed
            if self._note is None:
                self._open()
            if self._note is not None:
                os.pwrite(self._note, f"{steps:0{_DIGITS}d}".encode(), 0)

    def saved(self, seconds: float) -> None:
        """A save held training up for so long."""
        self._totals["num_saves"] += 1
        self._totals["save_seconds"] += seconds

    def text(self, useful_seconds: float) -> str:
        """One line for people."""
        totals = self.state(useful_seconds)
        wall = max(time.time() - totals["began"], 1e-9)
        return (
            f"{totals['interruptions']} interruptions, "
            f"{totals['steps_lost']} steps lost, {totals['num_saves']} saves "
            f"that took {totals['save_seconds']:.2f} s of the steps' time, "
            f"goodput {min(totals['useful_seconds'] / wall, 1.0):.1%}"
        )
