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
from benchmarks.planner import comparison
from benchmarks.step_clock import StepClock
from tfscale.pipeline.stages.memory import stage_memory

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

    def memory(self):
        """What is predicted, and that of the fullest stage if it is alone."""
        s = self.plan.settings
        text = f"{self.plan.num_bytes / 2**20:.0f} MiB"
        if (
            s.stages_per_device * s.model > 1
            or s.zero_stage
            or not isinstance(self._model, tfscale.PipelineModel)
        ):
            return text
        rows = _BATCH.value // (s.data * s.num_microbatches)
        stages = stage_memory(self._model.plan, rows)
        fullest = max(stage.total for stage in stages)
        return f"{text} / {fullest / 2**20:.0f} MiB"


def main(_):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(_DEVICES.value)
    tfscale.use_virtual_devices(_DEVICES.value)
    plans = tfscale.plan(
        build_model, num_devices=_DEVICES.value, batch_size=_BATCH.value
    )
    print(plans.device)
    plans.table()
    tokens = np.random.default_rng(0).integers(
        VOCABULARY, size=(_BATCH.value, _LENGTH.value + 1), dtype="int32"
    )
    batches = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    chosen = comparison.spread(plans, _PLANS.value)
    trained = [Trained(plan, batches.repeat()) for plan in chosen]
    for _ in range(_ROUNDS.value):
        for each in trained:
            each.take_turn()
    seconds = [statistics.median(each.seconds) for each in trained]
    memory = [each.memory() for each in trained]
    comparison.print_table(chosen, seconds, [memory.__getitem__])


if __name__ == "__main__":
    app.run(main)
