"""Processor time and memory of microbatches against the whole batch.

    python -m benchmarks.accumulation

Plain Keras and each number of microbatches train in processes of their own,
which take turns, so that a machine that slows down slows all of them down.
Memory is what TensorFlow's BFC allocator counts at its peak above what is
there between steps: weights and slots.
"""

import json
import os
import statistics
import subprocess
import sys

from absl import app
from absl import flags

_BATCH = flags.DEFINE_integer("batch", 32, "Sequences in a batch.")
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the GPT.")
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens in a sequence.")
_WIDTH = flags.DEFINE_integer("width", 256, "Features of a token.")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["2", "4", "8"], "How many.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each process.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of a turn.")


class _Worker:
    """A process that trains, and waits for its turn."""

    def __init__(self, microbatches):
        config = {
            "blocks": _BLOCKS.value,
            "width": _WIDTH.value,
            "length": _LENGTH.value,
            "batch": _BATCH.value,
            "stages": 0,
            "steps": _STEPS.value,
            "microbatches": microbatches,
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "benchmarks.accumulation.worker"),
                json.dumps(config),
            ],
            env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.turns = []

    def turn(self):
        """Has it train, and adds what it measured."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.turns.append(json.loads(self._process.stdout.readline()))

    def end(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def main(argv):
    del argv
    counts = [1, *map(int, _MICROBATCHES.value)]
    workers = {count: _Worker(count) for count in counts}
    try:
        for _ in range(_ROUNDS.value):
            for worker in workers.values():
                worker.turn()
    finally:
        for worker in workers.values():
            worker.end()
    print("| microbatches | processor time | ratio | memory | ratio |")
    print("|---|---|---|---|---|")
    whole = workers[1].turns
    for count, worker in workers.items():
        seconds = statistics.median(t["seconds"] for t in worker.turns)
        ratio = statistics.median(
            turn["seconds"] / first["seconds"]
            for turn, first in zip(worker.turns, whole)
        )
        memory = worker.turns[-1]["bytes"]
        print(
            f"| {count} | {seconds * 1e3:.0f} ms | {ratio:.3f} "
            f"| {memory / 2**20:.0f} MiB "
            f"| {memory / whole[-1]['bytes']:.3f} |"
        )


if __name__ == "__main__":
    app.run(main)
