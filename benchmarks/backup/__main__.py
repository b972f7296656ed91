"""What backups cost a run: time of its steps, memory, size, and a restart.

    python -m benchmarks.backup

Each measure has a process of its own. With and without backups take turns in
one process; the step that a save holds up is compared with the other steps of
the same `fit`, and with `tf.train.Checkpoint.write` between the steps of the
next one.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

from benchmarks import processes

_MEASURES = ("overhead", "stall", "memory", "position", "restart")
_ONLY = flags.DEFINE_multi_enum("only", _MEASURES, _MEASURES, "What.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Rows and columns of a matrix.")
_LAYERS = flags.DEFINE_integer("layers", 16, "Matrices.")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of a batch.")
_STEPS = flags.DEFINE_integer("steps", 120, "Steps of a turn: stall.")
_EVERY = flags.DEFINE_integer("every", 30, "Steps between two saves: stall.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Turns: overhead.")
_SECONDS = flags.DEFINE_float("seconds", 150.0, "Of a turn: overhead.")
_OVERHEAD_WIDTH = flags.DEFINE_integer(
    "overhead_width", 512, "Rows and columns of a matrix: overhead."
)
_RECORDS = flags.DEFINE_integer("records", 1_000_000, "Records: position.")
_RESTART_STEP = flags.DEFINE_integer("restart_step", 40, "When it is killed.")


def main(argv):
    del argv
    print("| measure | found |")
    print("|---|---|")
    for name in _MEASURES:
        if name in _ONLY.value:
            for measure, found in globals()[f"_{name}"]():
                print(f"| {measure} | {found} |", flush=True)


def _worker(what, **config):
    return processes.measure(
        "benchmarks.backup.worker",
        {"what": what, **config},
        stderr=subprocess.DEVNULL,
    )


def _size():
    return {"width": _WIDTH.value, "layers": _LAYERS.value}


def _overhead():
    found = _worker(
        "overhead",
        width=_OVERHEAD_WIDTH.value,
        layers=_LAYERS.value,
        rows=_ROWS.value,
        seconds=_SECONDS.value,
        rounds=_ROUNDS.value,
    )
    ratios = [b / a for a, b in zip(found["without"], found["with"])]
    all_ratios = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    yield "state: overhead", f"{found['bytes'] / 2**20:.0f} MiB"
    yield "steps of a turn", found["steps"]
    yield "saves of each turn", ", ".join(map(str, found["saves"]))
    lost = ", ".join(f"{steps:.0f}" for steps in found["lost"])
    yield "steps lost at a kill, on the average", lost
    yield (
        'steps with backups at "auto" to steps without',
        f"{statistics.median(ratios):.3f} ({all_ratios})",
    )


def _stall():
    found = _worker(
        "stall",
        rows=_ROWS.value,
        steps=_STEPS.value,
        every=_EVERY.value,
        **_size(),
    )
    yield "state", f"{found['bytes'] / 2**20:.0f} MiB"
    yield "a step without a save", f"{found['step'] * 1e3:.0f} ms"
    medians = []
    for name, text in (
        ("held", "a save makes its step longer by"),
        ("synchronous", "`tf.train.Checkpoint.write` takes"),
    ):
        seconds = found[name]
        medians.append(statistics.median(seconds))
        each = ", ".join(f"{1e3 * s:.0f}" for s in seconds)
        yield text, f"{medians[-1] * 1e3:.0f} ms ({each})"
    yield "ratio of the two", f"{medians[0] / medians[1]:.3f}"


def _memory():
    found = _worker("memory", **_size())
    for name in ("state", "largest_part", "save", "load"):
        text = {"save": "a save needs", "load": "a load needs"}.get(
            name, name.replace("_", " ")
        )
        yield f"memory: {text}", f"{found[name] / 2**20:.0f} MiB"


def _position():
    found = _worker("position", records=_RECORDS.value)
    yield (
        f"place in {_RECORDS.value} shuffled records",
        f"{found['bytes']} bytes",
    )


def _restart():
    """From SIGKILL to the end of the first step of the next process."""
    with tempfile.TemporaryDirectory() as folder:
        killed = _train(folder)
        last = _until(killed, _RESTART_STEP.value)
        killed.send_signal(signal.SIGKILL)
        start = time.perf_counter()
        killed.wait()
        again = _train(folder)
        first = _until(again, 0)
        seconds = time.perf_counter() - start
        again.kill()
        again.wait()
    yield "killed to training again", f"{seconds:.1f} s"
    yield "steps made again", f"{last - first + 1}"


def _train(folder):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "examples.train_preemptible"),
            f"--backup_dir={folder}",
        ],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _until(process, step):
    for line in process.stdout:
        if line.startswith("step "):
            number = int(line.split()[1])
            if number >= step:
                return number
    raise RuntimeError("The training ended before it was killed.")


if __name__ == "__main__":
    app.run(main)
