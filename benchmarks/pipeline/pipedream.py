"""PipeDream over 1F1B under `fit`, with the same batches.

    python -m benchmarks.pipeline.pipedream

Both run in this process, in turns. A device is one core.
"""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline import worker

_STAGES = flags.DEFINE_integer("stages", 2, "Stages.")
_WINDOW = flags.DEFINE_integer("window", 32, "Batches between two flushes.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Of 1F1B.")
_BLOCKS = flags.DEFINE_integer("blocks", 4, "Blocks of the GPT.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Windows of each.")


def make(schedule, num_microbatches, window):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=_STAGES.value))
    with strategy.scope():
        model = tfscale.PipelineModel(
            worker.build_gpt(_BLOCKS.value, 256, 64),
            num_microbatches,
            schedule,
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=window,
        )
    return model


def main(_):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(_STAGES.value)
    tfscale.use_virtual_devices(_STAGES.value)
    tokens = np.random.default_rng(0).integers(256, size=(32, 65))
    tokens = tokens.astype("int32")
    data = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    models = {
        "1f1b": make("1f1b", _MICROBATCHES.value, 1),
        "pipedream": make("pipedream", 1, _WINDOW.value),
    }
    times, firsts = {name: [] for name in models}, {}

    def seconds(model):
        start = time.perf_counter()
        model.fit(data.repeat(_WINDOW.value), verbose=0)
        return time.perf_counter() - start

    for name, model in models.items():
        firsts[name] = seconds(model)
    for _ in range(_ROUNDS.value):
        for name, model in models.items():
            times[name].append(seconds(model))
    ratio = statistics.median(
        one / other
        for one, other in zip(times["1f1b"], times["pipedream"], strict=True)
    )
    speedups = {
        name: model.plan.simulation.speedup for name, model in models.items()
    }
    for name, found in times.items():
        print(
            f"{name:10} {1000 * statistics.median(found) / _WINDOW.value:5.0f} "
            f"ms a batch, first {_WINDOW.value} batches {firsts[name]:.1f} s"
        )
    simulated = speedups["pipedream"] / speedups["1f1b"]
    print(f"over 1F1B {ratio:.3f}, simulated {simulated:.3f}")


if __name__ == "__main__":
    app.run(main)
