"""Rows per second of one model under every strategy, against one device.

    python -m benchmarks.strategies
    python -m benchmarks.strategies --only=mesh_data,servers_2

Plain Keras on one device has a process that stays. Of each other strategy the
processes are started, take turns with it, a few steps at a time, and end.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import gpt_flags

_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each takes its turn.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of one turn.")
_ONLY = flags.DEFINE_list("only", None, "Which strategies, by name.")

# name: title, devices of a process, flags of the launcher (None: without it)
STRATEGIES = {
    "one_device": ("OneDeviceStrategy", 1, None),
    "mirrored": ("MirroredStrategy, 2 devices", 2, None),
    "central": ("CentralStorageStrategy, 2 devices", 2, None),
    "mesh_data": ("MeshStrategy, data=2", 2, None),
    "mesh_zero": ("MeshStrategy, data=2, zero_stage=1", 2, None),
    "mesh_model": ("MeshStrategy, model=2", 2, None),
    "mesh_pipeline": ("MeshStrategy, pipeline=2", 2, None),
    "workers": (
        "MeshStrategy, data=2, over 2 workers", 1, ["--num_workers=2"]
    ),
    "coordinator": (
        "MeshStrategy, pipeline=2, a coordinator", 1, ["--num_workers=2"]
    ),
    "servers_1": (
        "ParameterServerStrategy, 1 worker",
        1,
        ["--num_workers=1", "--num_ps=1"],
    ),
    "servers_2": (
        "ParameterServerStrategy, 2 workers",
        1,
        ["--num_workers=2", "--num_ps=1"],
    ),
}  # fmt: skip


class Trained:
    """The processes of one strategy, of which one takes orders.

    Args:
        name: Of the strategy, or "plain".
        devices: Of each process.
        launcher: Flags of the launcher, or None for one process.
        rounds: How many turns it takes; those who take no orders have to
            know it. The first one, which is slower, is taken at once.
    """

    def __init__(self, name, devices=1, launcher=None, rounds=1_000_000):
        self.rows_per_second = []
        with socket.create_server(("localhost", 0)) as listener:
            config = {
                "name": name,
                "devices": devices,
                "port": listener.getsockname()[1],
                **gpt_flags.sizes(),
                "rounds": rounds,
                "steps": _STEPS.value,
            }
            command = ["benchmarks.strategies.worker", json.dumps(config)]
            if launcher is not None:
                command = ["tfscale.launch", *launcher, "-m", *command]
            environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
            if launcher is not None:
                environ["TFSCALE_VIRTUAL_DEVICES"] = str(devices)
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
            atexit.register(self.kill)
            self._wires = None
            listener.settimeout(1.0)
            while self._wires is None:
                try:
                    self._wires = listener.accept()[0].makefile("rw")
                except TimeoutError:
                    self._check()
        self._take_turn()

    def _check(self):
        if self._process.poll() is not None:
            raise RuntimeError(self._process.stderr.read())

    def _take_turn(self):
        self._wires.write("go\n")
        self._wires.flush()
        line = self._wires.readline()
        if not line:
            self._process.wait()
            self._check()
        return json.loads(line)

    def take_turn(self):
        """Trains for some steps, and notes how fast."""
        self.rows_per_second.append(self._take_turn())

    def end(self):
        """Waits for the processes, or ends them."""
        self._wires.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=60)
        self.kill()

    def kill(self):
        """Ends the processes: those of the launcher die with it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


def main(argv):
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = _ONLY.value or list(STRATEGIES)
    unknown = set(names) - set(STRATEGIES)
    if unknown:
        raise app.UsageError(
            f"--only is of {', '.join(STRATEGIES)}. Received: {unknown}."
        )
    print(f"| {'':41} | rows/s | of one device | range |", flush=True)
    print("|---|---|---|---|", flush=True)
    plain = Trained("plain")
    for name in names:
        title, devices, launcher = STRATEGIES[name]
        trained = Trained(name, devices, launcher, _ROUNDS.value + 1)
        plain.rows_per_second.clear()
        for _ in range(_ROUNDS.value):
            plain.take_turn()
            trained.take_turn()
        trained.end()
        ratios = [
            own / one
            for own, one in zip(trained.rows_per_second, plain.rows_per_second)
        ]
        print(
            f"| {title:41} | {statistics.median(trained.rows_per_second):6.1f}"
            f" | {statistics.median(ratios):5.2f} | {min(ratios):.2f} to "
            f"{max(ratios):.2f} |",
            flush=True,
        )
    plain.end()


if __name__ == "__main__":
    app.run(main)
