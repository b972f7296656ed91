"""Time of a step, and of the first one, of zero_stage=3 and of no ZeRO.

    python -m benchmarks.memory.times

Twelve Dense(1024) with Adam on two devices of a core, 128 rows each, trained in
turns in one process. Each turn begins with a model that is traced.
"""

import gc
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
    batch = worker.make_batch(config)
    _first_fit(config, batch, 1)  # It starts TensorFlow.
    times = {
        kind: {stage: [] for stage in _STAGES}
        for kind in ("step", "processor", "first step")
    }
    for turn in range(_ROUNDS.value):
        for stage in _STAGES[:: 1 if turn % 2 else -1]:
            model, seconds = _first_fit(config, batch, stage)
            times["first step"][stage].append(seconds)
            steps = worker.Peaks("CPU:0")
            model.fit(batch.repeat(6), verbose=0, callbacks=[steps])
            model = None
            # The first of a fit starts its iterator.
            times["step"][stage].append(statistics.median(steps.clock[1:]))
            times["processor"][stage].append(statistics.median(steps.times[1:]))
    for kind, found in times.items():
        none, sharded = (found[stage] for stage in _STAGES)
        ratios = [after / before for before, after in zip(none, sharded)]
        print(
            f"{kind:10} {1e3 * statistics.median(none):7.0f} ms "
            f"{1e3 * statistics.median(sharded):7.0f} ms "
            f"{statistics.median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _first_fit(config, batch, stage):
    """A new model, and the seconds of its first step."""
    # Else what is left of the models before is collected meanwhile.
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    keras.utils.set_random_seed(0)
    mesh = tfscale.device_mesh(data=2)
    with tfscale.MeshStrategy(mesh, zero_stage=stage).scope():
        model = worker.make_model(config)
    start = time.perf_counter()
    model.fit(batch, verbose=0)
    return model, time.perf_counter() - start


if __name__ == "__main__":
    app.run(main)
