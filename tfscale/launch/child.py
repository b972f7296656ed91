"""A process of the cluster that the launcher started, and what it printed."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence

from tfscale.launch import output
from tfscale.launch.warden import Warden

_NUM_LAST_LINES = 15
# The largest piece of a line that does not end, such as a progress bar.
_BYTES_OF_A_LINE = 65_536
_CHARACTERS_OF_A_LAST_LINE = 500


class Child:
    """Runs a command; its lines are printed after its name.

    It has a process group, which receives signals and which a warden kills when
    the launcher dies. `exit_code` is None as long as it runs, `ended_at` a time
    of `time.monotonic()`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        warden: Warden,
    ):
        self.name = name
        self._warden = warden
        self.last_lines = collections.deque(maxlen=_NUM_LAST_LINES)
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        warden.watch(self._process.pid)
        self.exit_code = None
        self.ended_at = None
        self._reader = threading.Thread(target=self._print, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self):
        code = self._process.wait()
        self.ended_at = time.monotonic()
        self.exit_code = code

    def _print(self):
        with self._process.stdout as stdout:
            for line in iter(lambda: stdout.readline(_BYTES_OF_A_LINE), b""):
                text = line.decode(errors="replace").rstrip("\r\n")
                # Progress bars write over their line; its last state counts.
                text = text.rpartition("\r")[2]
                self.last_lines.append(text[-_CHARACTERS_OF_A_LAST_LINE:])
                output.write(sys.stdout, f"[{self.name}] {text}")

    def send(self, number: int) -> None:
        """Sends a signal to the process and to what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kills the process and all of its process group."""
        self.send(signal.SIGKILL)
        self._warden.forget(self._process.pid)

    def wait_for_output(self) -> None:
        """Waits until all that it printed is printed here."""
        self._reader.join(timeout=2.0)
