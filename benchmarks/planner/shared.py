"""Steps of two replicas that share a core, and what the planner says of them.

    python -m benchmarks.planner.shared    # about 5 minutes

Devices and steps are measured in processor seconds, as if all devices were one
core: what else runs on the machine hardly counts.
"""

import json
import statistics
import sys
import time
from unittest import mock

import keras
import tensorflow as tf

import tfscale
from benchmarks import processes
from benchmarks.memory import worker
from tfscale.planner.cost import Settings
from tfscale.planner.measure import measure_device

_TABLES = {"vocabulary": 40_000, "width": 256, "batch": 4}
CONFIGS = {
    "Llama, mostly tables": {**_TABLES, "backbone": "llama", "depth": 1},
    "BERT, mostly tables": {**_TABLES, "backbone": "bert", "depth": 2},
    "Llama": {
        "backbone": "llama",
        "depth": 4,
        "width": 512,
        "batch": 4,
        "length": 128,
    },
    "BERT": {
        "backbone": "bert",
        "vocabulary": 4000,
        "depth": 4,
        "width": 256,
        "batch": 4,
        "length": 256,
    },
    "Dense, 32 rows": {"batch": 32},
    "Dense, 512 rows": {"batch": 512},
}
_ROUNDS = 3


class Clock(keras.callbacks.Callback):
    """Notes the processor seconds of each step."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.process_time()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.process_time() - self._start)


def measure(config):
    """Planned and measured seconds of a step, medians of some turns."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(config["data"])
    tfscale.use_virtual_devices(config["data"])
    with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
        model = worker.make_model(config)
    batch = worker.make_batch(config)
    model.fit(batch.repeat(2), verbose=0)
    planned, measured = [], []
    for _ in range(_ROUNDS):
        clock = Clock()
        model.fit(batch.repeat(6), verbose=0, callbacks=[clock])
        measured.append(statistics.median(clock.seconds[1:]))
        with mock.patch("time.perf_counter", time.process_time):
            device = measure_device(config["data"])
        plans = tfscale.plan(
            lambda: worker.build_model(config),
            num_devices=config["data"],
            batch_size=config["data"] * config["batch"],
            device=device,
            length=config["length"],
        )
        (plan,) = (p for p in plans if p.settings == Settings(data=2))
        planned.append(plan.step_seconds)
    return {
        "planned": statistics.median(planned),
        "measured": statistics.median(measured),
        "causes": plan.seconds,
        "device": str(device),
    }


def main():
    print("| | planned | measured | ratio |\n|---|---|---|---|")
    for name, config in CONFIGS.items():
        found = processes.measure(__spec__.name, {"data": 2, **config})
        planned, measured = found["planned"], found["measured"]
        print(
            f"| {name} | {1e3 * planned:.0f} ms | {1e3 * measured:.0f} ms "
            f"| {planned / measured:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        config = {**worker.DEFAULTS, **json.loads(sys.argv[1])}
        print(json.dumps(measure(config)))
    else:
        main()
