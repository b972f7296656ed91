"""Time of a step, and of the first one, of zero_stage=3 and of no ZeRO.

    python -m benchmarks.memory.times

Twelve Dense(1024) with Adam on two devices of a core, 128 rows each, trained in
turns in one process.
"""

import statistics
import time

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.memory import worker

_ROUNDS = flags.DEFINE_integer("rounds", 8, "Turns of each, of 5 steps.")
_STAGES = (0, 3)


def main(argv):
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tfscale.use_virtual_devices(2)
    config = {**worker.DEFAULTS, "data": 2, "batch": 128}
    batch, models, first = worker.make_batch(config), {}, {}
    for stage in (1, *_STAGES):  # the first one starts TensorFlow
        keras.utils.set_random_seed(0)
        mesh = tfscale.device_mesh(data=2)
        with tfscale.MeshStrategy(mesh, zero_stage=stage).scope():
            models[stage] = worker.make_model(config)
        start = time.perf_counter()
        models[stage].fit(batch, verbose=0)
        first[stage] = time.perf_counter() - start
    steps = {stage: worker.Peaks("CPU:0") for stage in _STAGES}
    for turn in range(_ROUNDS.value):
        for stage in _STAGES[:: 1 if turn % 2 else -1]:
            models[stage].fit(
                batch.repeat(6), verbose=0, callbacks=[steps[stage]]
            )
            # The first of a fit starts its iterator.
            del steps[stage].clock[-6], steps[stage].times[-6]
    for name, times in (
        ("step", {s: statistics.median(steps[s].clock) for s in _STAGES}),
        ("processor", {s: statistics.median(steps[s].times) for s in _STAGES}),
        ("first step", first),
    ):
        print(
            f"{name:10} {1e3 * times[0]:7.0f} ms {1e3 * times[3]:7.0f} ms "
            f"{times[3] / times[0]:5.2f}"
        )


if __name__ == "__main__":
    app.run(main)
