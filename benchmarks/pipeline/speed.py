"""Speed of a pipeline against the same model and batch on one device.

    python -m benchmarks.pipeline.speed

Every configuration lives in a process of its own. They are started one after
the other, which gives the time to the first step, and then take turns, a few
steps at a time, so that a machine that slows down slows all of them down.
"""

import statistics

from absl import app
from absl import flags

from benchmarks import gpt_flags
from benchmarks import processes

_STAGES = flags.DEFINE_multi_string(
    "pipeline",
    [
        "2,8,1f1b",
        "2,8,gpipe",
        "2,4,1f1b",
        "2,32,1f1b",
        "1,1,1f1b",
        "1,4,1f1b",
        "1,8,1f1b",
        "1,32,1f1b",
    ],
    "Configurations: stages, microbatches, schedule.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each takes its turn.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of one turn.")


class Worker:
    """A process that trains one configuration."""

    def __init__(self, stages=0, microbatches=1, schedule="1f1b"):
        self.name = f"{stages} stages, {microbatches:2}, {schedule}"
        if not stages:
            self.name = "plain Keras"
        self.stages, self.microbatches = stages, microbatches
        config = {
            "stages": stages,
            "microbatches": microbatches,
            "schedule": schedule,
            **gpt_flags.sizes(),
        }
        self._process = processes.Turns("benchmarks.pipeline.worker", config)
        self.first = self._process.answer()
        self.steps = []

    def run(self, steps):
        """Takes some steps, and notes how long one took."""
        answer = self._process.ask(steps)
        self.steps.append(answer["step"])
        self.peak = answer["peak"]


def bound(stages, microbatches):
    """The speed-up of GPipe and 1F1B with stages of equal cost."""
    return stages * microbatches / (microbatches + stages - 1)


def main(argv):
    del argv
    workers = [Worker()]
    for text in _STAGES.value:
        stages, microbatches, schedule = text.split(",")
        workers.append(Worker(int(stages), int(microbatches), schedule))
    for worker in workers:
        worker.run(1)  # the first steps after the first are slower
        worker.steps.clear()
    for _ in range(_ROUNDS.value):
        for worker in workers:
            worker.run(_STEPS.value)
    plain = workers[0]
    print(
        f"{'':24} {'step':>7} {'speed-up':>9} {'bound':>6} {'first step':>11}"
        f" {'against':>8} {'processor':>10} {'peak':>6}"
    )
    for worker in workers:
        ratio = statistics.median(
            one / own for one, own in zip(plain.steps, worker.steps)
        )
        step = statistics.median(worker.steps)
        first = worker.first["first_step"]
        processor = worker.first["first_processor"]
        print(
            f"{worker.name:24} {step * 1e3:4.0f} ms {ratio:9.3f} "
            f"{bound(max(worker.stages, 1), worker.microbatches):6.2f} "
            f"{first:9.1f} s {first / plain.first['first_step']:8.2f} "
            f"{processor:8.1f} s {worker.peak / 2**20:3.1f} GB"
        )


if __name__ == "__main__":
    app.run(main)
