"""Kills workers and their children when the launcher is killed.

Loaders of data, say, are in the process group of their worker, unless they left
it by setsid(2).

    launcher  "+71" "+72" ... "-71" ... ✗ the pipe closes
                │     │         │       │
    warden    notes groups     has ended └─► killpg(72), exits
"""

import contextlib
import os
import signal
import subprocess
import sys


class Warden:
    """A process that outlives this one, by as long as it takes to kill."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Its signals do not reach it.
        )

    def watch(self, group: int) -> None:
        """Has a process group killed when this process is."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Stops watching a group that is gone: its number may be used again."""
        self._tell(f"-{group}")

    def end(self) -> None:
        """Ends the warden; groups that it watches are killed."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, words):
        with contextlib.suppress(OSError):  # It was killed.
            self._process.stdin.write(f"{words}\n".encode())
            self._process.stdin.flush()


def _main():
    groups = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
