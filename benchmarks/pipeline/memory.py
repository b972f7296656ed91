"""Peak memory of a step, 1F1B against GPipe, measured and predicted.

    python -m benchmarks.pipeline.memory

Each schedule trains in a process of its own, once with what it repeats in a
loop and once written out, with TensorFlow's BFC allocator, which keeps count.
All virtual CPU devices share it, so it tells the peak of all stages together:
what a step needs on top of variables and optimizer slots. Predicted, as
`pipeline_summary` does it, are gradients and activations; what is left over are
microbatches on their way.
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
_RECOMPUTE = flags.DEFINE_boolean("recompute", False, "Recompute forwards.")
_WORKER = flags.DEFINE_string("worker", "", "Internal: what to measure.")
_WRITTEN_OUT = ", written out"


def measure(name):
    """Prints predicted and measured bytes of one schedule, as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfscale
    from benchmarks.pipeline import worker
    from tfscale.pipeline.stages.memory import stage_memory
    from tfscale.schedules import steady

    if name.endswith(_WRITTEN_OUT):
        steady.MIN_MICROBATCHES = _MICROBATCHES.value + 1
    keras.config.disable_interactive_logging()
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
            "schedule": name.removesuffix(_WRITTEN_OUT),
            "recompute": _RECOMPUTE.value,
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
    rows = _BATCH.value // _MICROBATCHES.value
    predicted = sum(
        stage.total - stage.weights - stage.slots
        for stage in stage_memory(model.plan, rows)
    )
    print(json.dumps({"predicted": predicted, "measured": peak - before}))


def main(argv):
    del argv
    if _WORKER.value:
        measure(_WORKER.value)
        return
    print(f"{'':24} {'predicted':>12} {'measured':>12}")
    for schedule in "gpipe", "1f1b":
        for name in schedule, schedule + _WRITTEN_OUT:
            output = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.pipeline.memory",
                    f"--worker={name}",
                    *sys.argv[1:],
                ],
                env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            ).stdout
            found = json.loads(output.splitlines()[-1])
            print(
                f"{name:24} {found['predicted'] / 2**20:8.0f} MiB "
                f"{found['measured'] / 2**20:8.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
