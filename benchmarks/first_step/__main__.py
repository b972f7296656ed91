"""How long the first step takes, on a mesh of CPU devices.

    python -m benchmarks.first_step
    python -m benchmarks.first_step --model=resnet50 --mesh=data=4
    python -m benchmarks.first_step --model=resnet50 --mesh=data=4 --one_stage

A GPT is compared with the same compiled by XLA, by the clock. A ResNet-50 is
compared with plain Keras on one device, in processor seconds. With
`--one_stage` it is a `PipelineModel` of one microbatch, which is traced once
for all replicas.

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
_MODEL = flags.DEFINE_enum("model", "gpt", ["gpt", "resnet50"], "What trains.")
_MESH = flags.DEFINE_string("mesh", "data=2", "Axes, with `,` between them.")
_ONE_STAGE = flags.DEFINE_bool(
    "one_stage", False, "Whether replicas train a `PipelineModel`."
)


def main(argv):
    del argv
    sizes = dict(item.split("=") for item in _MESH.value.split(","))
    mesh = {axis: int(size) for axis, size in sizes.items()}
    config = {**gpt_flags.sizes(), "model": _MODEL.value}
    one_stage = _ONE_STAGE.value
    if _MODEL.value == "gpt":
        measure, of_time = "first_step", "s"
        configs = {
            "first step": dict(
                mesh=mesh, one_stage=one_stage, jit_compile=False
            ),
            "with XLA": dict(mesh=mesh, one_stage=one_stage, jit_compile=True),
        }
    else:
        measure, of_time = "processors", "s of processors"
        configs = {
            "first step on one device": dict(
                mesh=None, one_stage=False, jit_compile=False
            ),
            f"on {_MESH.value}": dict(
                mesh=mesh, one_stage=one_stage, jit_compile=False
            ),
        }
    environment = {
        **os.environ,
        # Without it XLA compiles no clusters on CPUs.
        "TF_XLA_FLAGS": "--tf_xla_cpu_global_jit",
    }
    ratios = []
    for _ in range(_ROUNDS.value):
        one, other = (
            processes.measure(
                "benchmarks.first_step.worker",
                {**config, **of_one},
                env=environment,
            )
            for of_one in configs.values()
        )
        ratios.append(other[measure] / one[measure])
        of_one, of_other = configs
        print(
            f"{of_one} {one[measure]:.1f} {of_time}, {of_other} "
            f"{other[measure]:.1f} {of_time}, {ratios[-1]:.2f} times as long; "
            f"later steps {one['step']:.2f} and {other['step']:.2f} s; "
            f"losses {one['loss']:.6f} and {other['loss']:.6f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    app.run(main)
