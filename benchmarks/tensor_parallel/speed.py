"""Speed of model ranks against the same model and batch on one device.

    python -m benchmarks.tensor_parallel.speed --model=mlp
    python -m benchmarks.tensor_parallel.speed --model=gpt

Every configuration lives in a process of its own. They are started one after
the other and then take turns, a few steps at a time, so that a machine that
slows down slows all of them down.
"""

import os
import statistics
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import processes

_MODEL = flags.DEFINE_enum("model", "mlp", ["mlp", "gpt"], "What to train.")
_RANKS = flags.DEFINE_integer("ranks", 2, "Model ranks.", lower_bound=2)
_SYSTEMS = flags.DEFINE_list(
    "systems",
    ["tfscale", "sequence", "dtensor", "jax"],
    "Which ones take part; tfscale is what the others are compared with.",
)
_JAX_PYTHON = flags.DEFINE_string(
    "jax_python",
    sys.executable,
    "Python of an environment with Keras and JAX; needs no TensorFlow.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each takes its turn.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of one turn.")

_NAMES = {
    ("tfscale", False): "Keras on TensorFlow",
    ("tfscale", True): "tfscale.MeshStrategy",
    ("sequence", True): "sequence_parallel=True",
    ("dtensor", False): "raw DTensor",
    ("dtensor", True): "raw DTensor",
    ("jax", False): "Keras on JAX",
    ("jax", True): "ModelParallel on JAX",
}


class Worker:
    """A process that trains one configuration."""

    def __init__(self, system, devices):
        self.system, self.devices = system, devices
        self.name = f"{_NAMES[system, devices > 1]}, {devices}"
        config = {"system": system, "model": _MODEL.value, "devices": devices}
        self._process = processes.Turns(
            "benchmarks.tensor_parallel.worker",
            config,
            python=_JAX_PYTHON.value if system == "jax" else sys.executable,
            env=_environment(system, devices),
        )
        self.first = self._process.answer()
        self.steps, self.cores = [], []

    def run(self, steps):
        """Takes some steps, and notes how long one took."""
        answer = self._process.ask(steps)
        self.steps.append(answer["step"])
        self.cores.append(answer["cores"])


def _environment(system, devices):
    found = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    if system == "jax":
        # One thread for each device: XLA sizes its pools by NPROC, and
        # without Eigen's threads an operation stays on one of them.
        found |= {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(devices),
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false "
            f"--xla_force_host_platform_device_count={devices}",
        }
    return found


def _has_jax():
    command = [_JAX_PYTHON.value, "-c", "import jax, keras"]
    environment = _environment("jax", 1)
    return not subprocess.run(
        command, env=environment, capture_output=True
    ).returncode


def _systems():
    for system in _SYSTEMS.value:
        if system == "dtensor" and _MODEL.value != "mlp":
            print("DTensor does not take part: only the MLP is written for it.")
        elif system == "sequence" and _MODEL.value == "mlp":
            print("Sequence parallelism takes no part: the MLP has none.")
        elif system == "jax" and not _has_jax():
            print(
                "JAX does not take part: it is not installed. Install `jax` "
                "and `keras`, in this environment or in another one whose "
                "python --jax_python names."
            )
        else:
            yield system


def main(argv):
    del argv
    workers = [
        Worker(system, devices)
        for system in _systems()
        for devices in (1, _RANKS.value)
        if (system, devices > 1) in _NAMES
    ]
    for worker in workers:
        worker.run(1)  # the first steps after the first are slower
        worker.steps.clear()
        worker.cores.clear()
    for _ in range(_ROUNDS.value):
        for worker in workers:
            worker.run(_STEPS.value)
    _print_table(workers)


def _print_table(workers):
    plain = workers[0]
    alone = {w.system: w for w in workers if w.devices == 1}
    print(
        f"{'system, devices':25} {'step':>7} {'speed-up':>9} {'over own':>9} "
        f"{'cores':>6} {'first step':>11} {'first loss':>11}"
    )
    for worker in workers:
        step = statistics.median(worker.steps)
        print(
            f"{worker.name:25} {step * 1e3:4.0f} ms "
            f"{_ratio(plain, worker):9.3f} "
            f"{_ratio(alone.get(worker.system, plain), worker):9.3f} "
            f"{statistics.median(worker.cores):6.2f} "
            f"{worker.first['first_step']:9.1f} s "
            f"{worker.first['loss']:11.5f}"
        )


def _ratio(one, worker):
    return statistics.median(a / b for a, b in zip(one.steps, worker.steps))


if __name__ == "__main__":
    app.run(main)
