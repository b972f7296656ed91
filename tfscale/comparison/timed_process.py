"""The processes of one strategy of `tfscale.benchmark`, and their orders."""

import contextlib
import json
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tfscale.comparison.timed_training import Job

_MODULE = "tfscale.comparison.timed_training"
_SECONDS_TO_END = 60


class TimedProcess:
    """A process that trains when it is its turn, or several of a launcher.

    Args:
        job: What to train. It is pickled.
        launch: Flags of `tfscale.launch`; without any there is one process.
        timeout: Seconds until its start, its first step or a turn has failed.

    Raises:
        RuntimeError: From each method, if the processes have ended by
            themselves, with the last lines that they have written.
        TimeoutError: From each method, after `timeout` seconds.
    """

    def __init__(self, job: Job, launch: Sequence[str], timeout: float):
        self._timeout = timeout
        self._wires: Any = None
        self._opened = contextlib.ExitStack()
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "job")
        with open(path, "wb") as file:
            main = multiprocessing.spawn.get_preparation_data("benchmark")
            del main["authkey"]  # a secret, which refuses to be written
            pickle.dump(main, file)
            pickle.dump(job, file)
        self._errors = os.path.join(self._folder.name, "stderr")
        listener = socket.create_server(("localhost", 0))
        command = [_MODULE, path, str(listener.getsockname()[1])]
        if launch:
            command = ["tfscale.launch", *launch, "-m", *command]
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    # The process of one device stays while others run.
                    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                    **os.environ,
                },
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            with listener:
                self._wires = self._connected(listener)
        except BaseException:
            self.kill()
            raise

    def _connected(self, listener):
        listener.settimeout(1.0)
        for _ in range(int(self._timeout)):
            with contextlib.suppress(TimeoutError):
                wire = self._opened.enter_context(listener.accept()[0])
                wire.settimeout(self._timeout)
                return self._opened.enter_context(wire.makefile("rw"))
            if self._process.poll() is not None:
                raise self._failed()
        raise TimeoutError(f"No start in {self._timeout} seconds.")

    def take_turn(self) -> dict[str, float]:
        """Seconds, steps and rows of the next turn, and memory so far."""
        try:
            self._wires.write("go\n")
            self._wires.flush()
            line = self._wires.readline()
        except TimeoutError as error:
            self.kill()
            raise TimeoutError(
                f"No end of a turn in {self._timeout} seconds."
            ) from error
        except OSError:
            line = ""
        if not line:
            raise self._failed()
        return json.loads(line)

    def _failed(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        with open(self._errors) as file:
            lines = [line for line in file.read().splitlines() if line]
        return RuntimeError("\n".join(lines[-8:]) or "It has ended.")

    def end(self) -> None:
        """Lets the processes end, and kills those that do not."""
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        """Ends the processes; those of a launcher die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._hang_up()
        self._folder.cleanup()

    def _hang_up(self):
        with contextlib.suppress(OSError):  # what the other end has not read
            self._opened.close()
