"""How fast `predict` is on a mesh, against one device; int8 against int8.

python -m benchmarks.serving.offline
"""

import statistics

from absl import app
from absl import flags

from benchmarks.processes import Turns

_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each takes its turn.")

# kind: batch, and the meshes with their microbatches
CONTESTANTS = {
    "gpt": (32, [({"data": 2}, 1), ({"pipeline": 2}, 8)]),
    "mlp": (128, [({"model": 2}, 1)]),
    "int8": (128, [({"model": 2}, 1)]),
}


def main(argv):
    """Prints medians of ratios within a round."""
    del argv
    for kind, (batch, meshes) in CONTESTANTS.items():
        contestants = [
            Turns(
                "benchmarks.serving.worker",
                {
                    "kind": kind,
                    "axes": axes,
                    "microbatches": microbatches,
                    "batch": batch,
                },
            )
            for axes, microbatches in [({"data": 1}, 1), *meshes]
        ]
        rounds = [
            [contestant.ask() for contestant in contestants]
            for _ in range(_ROUNDS.value)
        ]
        for contestant in contestants:
            contestant.end()
        for number, (axes, _) in enumerate(meshes, 1):
            speed, work = (
                [answers[0][name] / answers[number][name] for answers in rounds]
                for name in ("seconds", "processor")
            )
            size = rounds[0][number]["bytes"] / rounds[0][0]["bytes"]
            cores = sum(axes.values())
            print(
                f"{kind} {axes}: {statistics.median(speed):.2f} of one device "
                f"({min(speed):.2f} to {max(speed):.2f}), by processor time "
                f"{cores * statistics.median(work):.2f}; bytes {size:.3f} "
                f"({rounds[0][number]['bytes']:,})",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
