"""Steps of some plans of `tfscale.plan`, measured beside what it says of them.

    python -m benchmarks.planner

A device is one core. The plans are spread evenly over all that there are, from
the fastest to the slowest. All are in one process, and take turns.
"""

import statistics

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt
from benchmarks.step_clock import StepClock
from tfscale.pipeline.stage_memory import stage_memory

_DEVICES = flags.DEFINE_integer("devices", 2, "Virtual devices.")
_PLANS = flags.DEFINE_integer("plans", 12, "How many plans.")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "How often each takes its turn.")
_STEPS = flags.DEFINE_integer("steps", 2, "Steps of one turn.")
_BLOCKS = flags.DEFINE_integer("blocks", 4, "Blocks of the GPT.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the GPT.")
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens of an example.")
_BATCH = flags.DEFINE_integer("batch", 16, "Examples of a step.")


def build_model():
    keras.utils.set_random_seed(0)
    return build_gpt(_BLOCKS.value, _WIDTH.value, _LENGTH.value)


class Trained:
    """A plan, its model, and the times of its steps."""

    def __init__(self, plan, batches):
        self.plan, self._batches, self.seconds = plan, batches, []
        with plan.strategy().scope():
            self._model = plan.wrap(build_model())
            self._model.compile(
                "adam",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        self._fit(1)

    def _fit(self, steps):
        clock = StepClock()
        self._model.fit(
            self._batches, steps_per_epoch=steps, verbose=0, callbacks=[clock]
        )
        return clock.times

    def take_turn(self):
        """Trains for some steps."""
        self.seconds += self._fit(_STEPS.value)

    def stage_memory(self):
        """Bytes of the fullest stage, if it has a device of its own."""
        s = self.plan.settings
        if s.stages_per_device > 1 or s.model > 1 or s.zero_stage:
            return None
        if not isinstance(self._model, tfscale.PipelineModel):
            return None
        rows = _BATCH.value // (s.data * s.num_microbatches)
        stages = stage_memory(self._model.plan, rows)
        return max(stage.total for stage in stages)


def ranks(values):
    """The place of each value in their order."""
    return np.argsort(np.argsort(values))


def main(_):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(_DEVICES.value)
    tfscale.use_virtual_devices(_DEVICES.value)
    plans = tfscale.plan(
        build_model, num_devices=_DEVICES.value, batch_size=_BATCH.value
    )
    print(plans.device)
    plans.table()
    numbers = np.linspace(0, len(plans) - 1, _PLANS.value).round().astype(int)
    tokens = np.random.default_rng(0).integers(
        VOCABULARY, size=(_BATCH.value, _LENGTH.value + 1), dtype="int32"
    )
    batches = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    trained = [Trained(plans[n], batches.repeat()) for n in numbers]
    for _ in range(_ROUNDS.value):
        for each in trained:
            each.take_turn()
    print("| plan | predicted | measured | memory | `stage_memory` |")
    print("|---|---|---|---|---|")
    for each in trained:
        memory = each.stage_memory()
        print(
            f"| {each.plan.settings} | {1e3 * each.plan.step_seconds:.0f} ms"
            f" | {1e3 * statistics.median(each.seconds):.0f} ms ("
            f"{1e3 * min(each.seconds):.0f} to {1e3 * max(each.seconds):.0f})"
            f" | {each.plan.num_bytes / 2**20:.0f} MiB | "
            + ("" if memory is None else f"{memory / 2**20:.0f} MiB")
            + " |"
        )
    for name, of in (("medians", statistics.median), ("shortest", min)):
        measured = [of(each.seconds) for each in trained]
        predicted = [each.plan.step_seconds for each in trained]
        correlation = np.corrcoef(ranks(predicted), ranks(measured))[0, 1]
        print(
            f"Of the {name} steps: rank correlation {correlation:.3f}, the "
            f"picked plan takes {measured[0] / min(measured):.3f} of the best."
        )


if __name__ == "__main__":
    app.run(main)
