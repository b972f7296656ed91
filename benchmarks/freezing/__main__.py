"""Steps with frozen layers, on cached activations, and with a teacher.

    python -m benchmarks.freezing

Each kind of step lives in a process of its own; they take turns, so that a
machine that slows down slows all of them down. Ratios are medians over turns
against the base of the same turn: of processor time on one core, of the time by
the clock on two.
"""

import statistics

from absl import app
from absl import flags

from benchmarks import processes

_WIDTH = flags.DEFINE_integer("width", 512, "Neurons of a layer.")
_BATCH = flags.DEFINE_integer("batch", 512, "Rows of a batch.")
_MICROBATCHES = flags.DEFINE_integer(
    "microbatches", 16, "Microbatches of a step on two stages."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each process.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps of a turn.")

# What is compared: the base first.
_TABLES = (
    ("processor", ("all trainable", "half frozen", "cached activations")),
    ("clock", ("2 stages, cut in halves", "2 stages, cut by cost")),
    ("processor", ("student", "with its teacher", "with the teacher's logits")),
)


def main(argv):
    del argv
    config = {
        "width": _WIDTH.value,
        "batch": _BATCH.value,
        "microbatches": _MICROBATCHES.value,
        "steps": _STEPS.value,
    }
    for clock, kinds in _TABLES:
        workers = {
            kind: processes.Turns(
                "benchmarks.freezing.worker", {**config, "kind": kind}
            )
            for kind in kinds
        }
        turns = {kind: [] for kind in kinds}
        try:
            for _ in range(_ROUNDS.value):
                for kind, worker in workers.items():
                    turns[kind].append(worker.ask()[clock])
        finally:
            for worker in workers.values():
                worker.end()
        print(f"\n| step | {clock} time | ratio |\n|---|---|---|")
        for kind, own in turns.items():
            ratios = [a / b for a, b in zip(own, turns[kinds[0]])]
            print(
                f"| {kind} | {statistics.median(own) * 1e3:.1f} ms "
                f"| {statistics.median(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
