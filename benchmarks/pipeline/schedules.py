"""Schedules by name over 1F1B, beside what the simulator says.

    python -m benchmarks.pipeline.schedules

Actions wait in place of computing, so that few cores carry many devices and
their load hardly counts: what is measured is the order of the actions and how
TensorFlow carries it out, not the work.
"""

import statistics

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline.waiting import seconds_in_turns
from benchmarks.pipeline.waiting import waiting_step
from tfscale.schedules.named_schedules import SCHEDULES

_DEVICES = flags.DEFINE_integer("devices", 4, "Devices of the pipeline.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Of a step.")
_UNIT = flags.DEFINE_float("unit", 0.04, "Seconds of F, B and W of a device.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Steps of each schedule.")


def make_step(strategy, schedule):
    """A function that runs a step, and what the simulator says of it."""
    keras.utils.clear_session()
    with strategy.scope():
        layers = [keras.layers.Dense(2) for _ in range(2 * _DEVICES.value)]
        model = tfscale.PipelineModel(
            keras.Sequential([keras.Input((2,)), *layers]),
            _MICROBATCHES.value,
            schedule,
        )
        model.compile("sgd", "mse")
    schedule = model.plan.schedule
    seconds = _UNIT.value * _DEVICES.value / schedule.num_stages
    rows = 2 * _MICROBATCHES.value
    run = waiting_step(model, strategy, lambda action: seconds, rows)
    predicted = tfscale.schedules.simulate(
        schedule, forward=seconds, backward=2 * seconds, weight=seconds
    )
    return run, predicted.makespan


def main(_):
    tf.config.threading.set_inter_op_parallelism_threads(4 * _DEVICES.value)
    tfscale.use_virtual_devices(_DEVICES.value)
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(pipeline=_DEVICES.value)
    )
    steps = {name: make_step(strategy, name) for name in SCHEDULES}
    runs = {name: run for name, (run, _) in steps.items()}
    times = seconds_in_turns(runs, _ROUNDS.value)
    base, simulated_base = np.array(times["1f1b"]), steps["1f1b"][1]
    print(f"{'':12} {'step':>8} {'over 1F1B':>10} {'simulated':>10}")
    for name, (_, simulated) in steps.items():
        ratio = statistics.median(base / np.array(times[name]))
        print(
            f"{name:12} {statistics.median(times[name]):7.3f}s {ratio:10.3f} "
            f"{simulated_base / simulated:10.3f}"
        )


if __name__ == "__main__":
    app.run(main)
