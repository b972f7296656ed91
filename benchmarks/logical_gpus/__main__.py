"""A GPT on logical devices of one GPU, against plain Keras on the whole chip.

    TF_FORCE_GPU_ALLOW_GROWTH=true python -m benchmarks.logical_gpus

Logical devices share the chip, so nothing gets faster: what is measured is what
tfscale costs, and the memory of each device. Every configuration lives in a
process of its own; those of a group are traced at once, and then take turns.
"""

import json
import statistics

from absl import app
from absl import flags

from benchmarks import processes

_GROUPS = flags.DEFINE_multi_string(
    "group",
    [
        "plain; data=1; pipeline=1; pipeline=2",
        "plain; data=2; model=2; model=2 sequence_parallel",
        'plain; data=2 zero_stage=3; data=1 offload="slots"; pipeline=4',
        "plain jit; pipeline=1 jit; pipeline=2 jit",
    ],
    "Configurations with `;` between them, of `name=value` in JSON: the "
    "names are in worker.py. The first one is what the others are held to.",
)
_ALL = flags.DEFINE_string("all", "", "What all configurations have.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "How often each takes its turn.")
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
        measure([text.strip() for text in group.split(";")])


def measure(texts):
    """Prints a line for each configuration of a group."""
    workers = [
        processes.Turns(
            "benchmarks.logical_gpus.worker", {**read(_ALL.value), **read(text)}
        )
        for text in texts
    ]
    firsts = [worker.answer() for worker in workers]
    for worker in workers:
        worker.ask(2)  # the first steps after the first are slower
    rounds = [
        [worker.ask(_STEPS.value) for worker in workers]
        for _ in range(_ROUNDS.value)
    ]
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
