"""Processor time and memory of microbatches against the whole batch.

    python -m benchmarks.accumulation

Plain Keras and each number of microbatches train in processes of their own,
which take turns, so that a machine that slows down slows all of them down.
Memory is what TensorFlow's BFC allocator counts at its peak above what is
there between steps: weights and slots.
"""

import os
import statistics

from absl import app
from absl import flags

from benchmarks import gpt_flags
from benchmarks import processes

_MICROBATCHES = flags.DEFINE_list("microbatches", ["2", "4", "8"], "How many.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each process.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of a turn.")


def _worker(microbatches):
    """A process that trains when it is its turn."""
    return processes.Turns(
        "benchmarks.accumulation.worker",
        {
            **gpt_flags.sizes(),
            "stages": 0,
            "steps": _STEPS.value,
            "microbatches": microbatches,
        },
        env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"},
    )


def main(argv):
    del argv
    counts = [1, *map(int, _MICROBATCHES.value)]
    workers = {count: _worker(count) for count in counts}
    turns = {count: [] for count in counts}
    try:
        for _ in range(_ROUNDS.value):
            for count, worker in workers.items():
                turns[count].append(worker.ask())
    finally:
        for worker in workers.values():
            worker.end()
    print("| microbatches | processor time | ratio | memory | ratio |")
    print("|---|---|---|---|---|")
    whole = turns[1]
    for count, own in turns.items():
        seconds = statistics.median(turn["seconds"] for turn in own)
        ratio = statistics.median(
            turn["seconds"] / first["seconds"]
            for turn, first in zip(own, whole)
        )
        memory = own[-1]["bytes"]
        print(
            f"| {count} | {seconds * 1e3:.0f} ms | {ratio:.3f} "
            f"| {memory / 2**20:.0f} MiB "
            f"| {memory / whole[-1]['bytes']:.3f} |"
        )


if __name__ == "__main__":
    app.run(main)
