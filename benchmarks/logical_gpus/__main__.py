"""A GPT on logical devices of one GPU, against plain Keras on the whole chip.

    TF_FORCE_GPU_ALLOW_GROWTH=true python -m benchmarks.logical_gpus
    TF_FORCE_GPU_ALLOW_GROWTH=true python -m benchmarks.logical_gpus --group=xla

Logical devices share the chip, so nothing gets faster: what is measured is what
tfscale costs, and the memory of each device. Every configuration lives in a
process of its own; those of a group are traced at once, and then take turns.
"""

import json
import statistics
import time

from absl import app
from absl import flags

from benchmarks import processes

# What all configurations of a group have, and the configurations.
GROUPS = {
    "meshes": ("", "plain; data=1; pipeline=1; pipeline=2"),
    "xla": ("blocks=8", "plain jit; plain; data=1 jit; data=2 jit"),
    "xla_meshes": (
        "blocks=8 jit",
        "plain; model=2; data=2 zero_stage=3; data=2 pipeline=2",
    ),
    "xla_stages": (
        "blocks=8 jit",
        "plain; pipeline=1 microbatches=1; pipeline=1; pipeline=2",
    ),
    "float32": (
        'blocks=8 policy="float32"',
        "plain jit; plain; data=1 jit; data=2 jit",
    ),
    "resnet": (
        'network="resnet" length=128 batch=64',
        "plain jit; plain; data=1 jit; data=2 jit",
    ),
    "resnet_float32": (
        'network="resnet" length=128 batch=64 policy="float32"',
        "plain jit; plain; data=1 jit; data=2 jit",
    ),
    "stages": ("blocks=8", "plain; pipeline=4; data=2 pipeline=2"),
    "offload": (
        "blocks=8",
        'plain; data=1 offload="slots"; data=2 offload="slots"',
    ),
    "sequence": (
        "blocks=8",
        "plain; data=2; model=2; model=2 sequence_parallel",
    ),
}
_GROUPS = flags.DEFINE_multi_string(
    "group",
    list(GROUPS),
    "Names of groups; or configurations with `;` between them, of `name=value` "
    "in JSON: the names are in worker.py. The first configuration is what the "
    "others are held to.",
)
_ALL = flags.DEFINE_string(
    "all", "", "What all configurations have, after what a group says."
)
_ROUNDS = flags.DEFINE_integer("rounds", 4, "How often each takes its turn.")
_MINUTES = flags.DEFINE_float(
    "minutes", 6.0, "Of a group: no round begins later."
)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps of one turn.")


def read(text):
    """The config that a text describes; a name alone is true."""
    config = {}
    for item in text.split():
        name, _, value = item.partition("=")
        config[name] = json.loads(value or "true")
    return config


def main(argv):
    del argv
    print(f"{'':42} {'step':>8} {'ratio':>6} {'first':>7} {'loss':>8}  peaks")
    for group in _GROUPS.value:
        common, texts = GROUPS.get(group, ("", group))
        print(f"{group}  {common} {_ALL.value}", flush=True)
        measure(common, [text.strip() for text in texts.split(";")])


def measure(common, texts):
    """Prints a line for each configuration of a group."""
    end = time.monotonic() + 60 * _MINUTES.value
    workers = [
        processes.Turns(
            "benchmarks.logical_gpus.worker",
            {**read(common), **read(text), **read(_ALL.value)},
        )
        for text in texts
    ]
    firsts = [worker.answer() for worker in workers]
    for worker in workers:
        worker.ask(2)  # the first steps after the first are slower
    rounds = []
    while len(rounds) < _ROUNDS.value and (
        not rounds or time.monotonic() < end
    ):
        rounds.append([worker.ask(_STEPS.value) for worker in workers])
    for worker in workers:
        worker.end()
    for index, text in enumerate(texts):
        steps = [answers[index]["step"] for answers in rounds]
        ratios = [
            own / answers[0]["step"] for own, answers in zip(steps, rounds)
        ]
        peaks = rounds[-1][index].get("peaks", [])
        print(
            f"{text:42} {1e3 * statistics.median(steps):5.1f} ms "
            f"{statistics.median(ratios):6.3f} "
            f"{firsts[index]['first_step']:5.1f} s "
            f"{rounds[-1][index]['loss']:8.5f}  "
            f"{', '.join(f'{peak / 2**30:.2f}' for peak in peaks)} GiB",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
