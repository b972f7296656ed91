"""Peak memory of activations, 1F1B against GPipe, measured and simulated.

    python -m benchmarks.pipeline.memory

Each schedule trains in a process of its own, with TensorFlow's BFC allocator,
which keeps count. All virtual CPU devices share it, so it tells the peak of all
stages together: what a step needs on top of variables and optimizer slots. The
simulator tells it of activations alone; what is left over are gradients,
microbatches on their way and what lives inside a function.
"""

import json
import os
import subprocess
import sys

from absl import app
from absl import flags

_STAGES = flags.DEFINE_integer("stages", 4, "Stages.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 16, "Microbatches.")
_BATCH = flags.DEFINE_integer("batch", 64, "Sequences in a batch.")
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens in a sequence.")
_WORKER = flags.DEFINE_string("worker", "", "Internal: schedule to measure.")


def measure(schedule):
    """Prints predicted and measured bytes of one schedule, as JSON."""
    import numpy as np
    import tensorflow as tf

    import tfscale
    from benchmarks.pipeline import worker
    from tfscale.pipeline.stages import memory

    tfscale.use_virtual_devices(_STAGES.value)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(_STAGES.value)
    model = worker.make_model(
        {
            "blocks": 8,
            "width": 256,
            "length": _LENGTH.value,
            "batch": _BATCH.value,
            "stages": _STAGES.value,
            "microbatches": _MICROBATCHES.value,
            "schedule": schedule,
        }
    )
    tokens = np.random.default_rng(0).integers(
        worker.VOCABULARY, size=(_BATCH.value, _LENGTH.value + 1)
    )
    batches = tf.data.Dataset.from_tensors(
        (tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32"))
    ).repeat()
    model.fit(batches, steps_per_epoch=2, verbose=0)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(batches, steps_per_epoch=2, verbose=0)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    (program,) = model.programs
    simulation = tfscale.pipeline.simulate(
        model.plan.schedule,
        activation_bytes=memory.activation_bytes(program.stages),
    )
    print(
        json.dumps(
            {
                "measured": peak - before,
                "simulated": sum(simulation.peak_device_bytes),
            }
        )
    )


def main(argv):
    del argv
    if _WORKER.value:
        measure(_WORKER.value)
        return
    found = {}
    for schedule in "gpipe", "1f1b":
        output = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.pipeline.memory",
                f"--worker={schedule}",
                *sys.argv[1:],
            ],
            env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        ).stdout
        found[schedule] = json.loads(output.splitlines()[-1])
    difference = {
        key: found["gpipe"][key] - found["1f1b"][key]
        for key in ("simulated", "measured")
    }
    print(f"{'':24} {'simulated':>12} {'measured':>12}")
    for name, row in (*found.items(), ("gpipe less 1f1b", difference)):
        print(
            f"{name:24} {row['simulated'] / 2**20:8.0f} MiB "
            f"{row['measured'] / 2**20:8.0f} MiB"
        )


if __name__ == "__main__":
    app.run(main)
