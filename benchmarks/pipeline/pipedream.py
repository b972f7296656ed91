"""PipeDream over 1F1B under `fit`, with the same batches.

    python -m benchmarks.pipeline.pipedream
    python -m benchmarks.pipeline.pipedream --unit=0.08

Both run in this process, in turns. A device is one core. With `--unit` actions
wait in place of computing, so that the load of the machine hardly counts.
"""

import contextlib
import statistics
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline import waiting
from benchmarks.pipeline import worker
from tfscale.pipeline.running import trainer
from tfscale.pipeline.running.step import PipelineStep

_STAGES = flags.DEFINE_integer("stages", 2, "Stages.")
_WINDOW = flags.DEFINE_integer("window", 32, "Batches between two flushes.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Of 1F1B.")
_BLOCKS = flags.DEFINE_integer("blocks", 4, "Blocks of the GPT.")
_UNIT = flags.DEFINE_float(
    "unit", 0, "Seconds that F, B and W of a batch wait in a stage; 0 computes."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Windows of each.")


def make(schedule, num_microbatches, window):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=_STAGES.value))
    with strategy.scope():
        if _UNIT.value:
            layers = [keras.layers.Dense(2) for _ in range(_STAGES.value)]
            model = keras.Sequential([keras.Input((2,)), *layers])
            loss = "mse"
        else:
            model = worker.build_gpt(_BLOCKS.value, 256, 64)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = tfscale.PipelineModel(model, num_microbatches, schedule)
        model.compile("adam", loss, steps_per_execution=window)
    return model


def waits(num_microbatches):
    """Makes the actions of what is traced within wait, if they are to."""
    if not _UNIT.value:
        return contextlib.nullcontext()
    emit = waiting.waiting(lambda _: _UNIT.value / num_microbatches)

    def step(*args, **options):
        return PipelineStep(*args, **options | {"emit": emit})

    return mock.patch.object(trainer, "PipelineStep", step)


def main(_):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # A thread that waits does nothing else.
    threads = _STAGES.value * (4 if _UNIT.value else 1)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tfscale.use_virtual_devices(_STAGES.value)
    tokens = np.random.default_rng(0).integers(256, size=(32, 65))
    tokens = tokens.astype("int32")
    x, y = tokens[:, :-1], tokens[:, 1:]
    if _UNIT.value:
        x = y = tokens[:, :2].astype("float32")
    data = tf.data.Dataset.from_tensors((x, y))
    microbatches = {"1f1b": _MICROBATCHES.value, "pipedream": 1}
    windows = {"1f1b": 1, "pipedream": _WINDOW.value}
    models = {
        name: make(name, microbatches[name], windows[name]) for name in windows
    }
    times, firsts = {name: [] for name in models}, {}

    def seconds(model):
        start = time.perf_counter()
        model.fit(data.repeat(_WINDOW.value), verbose=0)
        return time.perf_counter() - start

    for name, model in models.items():
        with waits(microbatches[name]):
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
