"""How long the first step takes with XLA and without, on a mesh of CPU devices.

    python -m benchmarks.first_step

Each configuration is built, traced and run in a process of its own, one after
the other, in every round; a round's ratio is that of its two first steps.
"""

import os
import statistics

from absl import app
from absl import flags

from benchmarks import gpt_flags
from benchmarks import processes

_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each is measured.")
_MESH = flags.DEFINE_string("mesh", "data=2", "Axes, with `,` between them.")


def main(argv):
    del argv
    sizes = dict(item.split("=") for item in _MESH.value.split(","))
    config = {
        **gpt_flags.sizes(),
        "mesh": {axis: int(size) for axis, size in sizes.items()},
    }
    environment = {
        **os.environ,
        # Without it XLA compiles no clusters on CPUs.
        "TF_XLA_FLAGS": "--tf_xla_cpu_global_jit",
    }
    ratios = []
    for _ in range(_ROUNDS.value):
        plain, compiled = (
            processes.measure(
                "benchmarks.first_step.worker",
                {**config, "jit_compile": jit_compile},
                env=environment,
            )
            for jit_compile in (False, True)
        )
        ratios.append(compiled["first_step"] / plain["first_step"])
        print(
            f"first step {plain['first_step']:.1f} s, with XLA "
            f"{compiled['first_step']:.1f} s, {ratios[-1]:.2f} times as long; "
            f"losses {plain['loss']:.6f} and {compiled['loss']:.6f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    app.run(main)
