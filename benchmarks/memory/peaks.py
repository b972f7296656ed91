"""Memory at rest and at the peaks, of each way to divide a model.

    python -m benchmarks.memory.peaks

All devices together, as multiples of the bytes of all weights once. Medians of
several processes: which free pieces of memory a tensor gets differs.
"""

import statistics

import tensorflow as tf
from absl import app
from absl import flags

from benchmarks.memory.measure import GPT
from benchmarks.memory.measure import measure

_WIDTH = flags.DEFINE_integer("width", 1024, "Features of each of 12 layers.")
_ONLY = flags.DEFINE_string("only", "", "Measures what has this in its name.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes of each.")

CONFIGS = {
    "one device": {},
    "data 2": {"data": 2},
    "data 2, zero_stage=1": {"data": 2, "zero_stage": 1},
    "data 2, zero_stage=3": {"data": 2, "zero_stage": 3},
    "data 4": {"data": 4},
    "data 4, zero_stage=1": {"data": 4, "zero_stage": 1},
    "data 4, zero_stage=3": {"data": 4, "zero_stage": 3},
    "data 2, zero_stage=3, clipped": {
        "data": 2,
        "zero_stage": 3,
        "optimizer": {"global_clipnorm": 1.0},
    },
    "data 2, zero_stage=1, clipped": {
        "data": 2,
        "zero_stage": 1,
        "optimizer": {"global_clipnorm": 1.0},
    },
    "data 2, zero_stage=1, EMA": {
        "data": 2,
        "zero_stage": 1,
        "optimizer": {"use_ema": True, "ema_overwrite_frequency": 2},
    },
    "data 2, zero_stage=1, loss scaling": {
        "data": 2,
        "zero_stage": 1,
        "loss_scale": True,
    },
    "data 2, zero_stage=1, restored": {
        "data": 2,
        "zero_stage": 1,
        "restore": True,
    },
    "model 2": {"model": 2},
    "pipeline 4, 8 microbatches": {"pipeline": 4},
    "one device, 2048 rows": {"batch": 2048},
    "accumulation, 8 of 2048 rows": {"batch": 2048, "accumulate": 8},
    "pipeline 4, gpipe, 2048 rows": {
        "pipeline": 4,
        "batch": 2048,
        "schedule": "gpipe",
    },
    "pipeline 4, 1f1b, 2048 rows": {"pipeline": 4, "batch": 2048},
    "the same, recompute=True": {
        "pipeline": 4,
        "batch": 2048,
        "recompute": True,
    },
    "GPT, data 4": {**GPT, "data": 4},
    "GPT, data 4, zero_stage=3": {**GPT, "data": 4, "zero_stage": 3},
    "GPT, model 2, 64 rows": {**GPT, "model": 2, "batch": 64},
    "the same, sequence_parallel=True": {
        **GPT,
        "model": 2,
        "batch": 64,
        "sequence_parallel": True,
    },
}
# What only a device with a memory of its own can show.
ON_GPU = {
    "one GPU": {"device": "GPU"},
    "one GPU, offload='slots'": {"device": "GPU", "offload": "slots"},
}


def main(argv):
    del argv
    print(
        f"{'':36} {'rest':>6} {'step':>6} {'(max)':>6} {'predicted':>9}"
        f" {'evaluate':>9} {'processor':>10} {'clock':>10}"
    )
    configs = {k: v for k, v in CONFIGS.items() if _ONLY.value in k}
    if tf.config.list_physical_devices("GPU"):
        configs.update(ON_GPU)
    for name, config in configs.items():
        found = [
            measure({"width": _WIDTH.value, **config})
            for _ in range(_ROUNDS.value)
        ]
        typical = {
            key: statistics.median(each[key] for each in found)
            for key in found[0]
        }
        print(
            f"{name:36} {typical['rest']:6.2f} {typical['step']:6.2f} "
            f"{typical['largest_step']:6.2f} {typical['predicted']:9.2f} "
            f"{typical['evaluate']:9.2f} "
            f"{1e3 * typical['processor']:7.0f} ms "
            f"{1e3 * typical['clock']:7.0f} ms",
            flush=True,
        )
    if not tf.config.list_physical_devices("GPU"):
        print(
            "There is no GPU here. On CPUs the host is the device: "
            "offload='slots' cannot be seen to save anything, and was not "
            "measured."
        )


if __name__ == "__main__":
    app.run(main)
