"""Schedules by name over 1F1B, beside what the simulator says.

    python -m benchmarks.pipeline.schedules

Actions wait in place of computing, so that few cores carry many devices and
their load hardly counts: what is measured is the order of the actions and how
TensorFlow carries it out, not the work.
"""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from tfscale.pipeline.planning.named_schedules import SCHEDULES
from tfscale.pipeline.running.step import PipelineStep

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
    plan = model.plan
    seconds = _UNIT.value * _DEVICES.value / plan.schedule.num_stages
    x = tf.ones((2 * _MICROBATCHES.value, 2))
    with strategy.scope():
        model._symbolic_build(data_batch=(x, x))

    apart = {a.stage for a in plan.schedule.order() if a.kind == "W"}

    def emit(action, function, arguments):
        # The executor has a W for every B of a stage that has one for some.
        together = action.kind == "B" and action.stage not in apart
        units = 2 if together else 1

        def wait(*results):
            time.sleep(units * seconds)
            return results

        results = function(*arguments)
        dtypes = [result.dtype for result in results]
        waited = tf.numpy_function(wait, results, dtypes, stateful=False)
        for result, late in zip(results, waited, strict=True):
            late.set_shape(result.shape)
        return waited

    def replica_step():
        targets = x, None
        program = model._programs.get([x], targets, training=True)
        step = PipelineStep(plan, program, strategy, emit=emit)
        actions = plan.schedule.order()
        (made,) = step.run([([x], targets)], actions=actions, training=True)
        return made.loss, made.gradients

    @tf.function(autograph=False)
    def run():
        return strategy.run(replica_step)

    run()
    predicted = tfscale.pipeline.simulate(
        plan.schedule, forward=seconds, backward=2 * seconds, weight=seconds
    )
    return run, predicted.makespan


def main(_):
    tf.config.threading.set_inter_op_parallelism_threads(4 * _DEVICES.value)
    tfscale.use_virtual_devices(_DEVICES.value)
    strategy = tfscale.MeshStrategy(
        tfscale.device_mesh(pipeline=_DEVICES.value)
    )
    steps = {name: make_step(strategy, name) for name in SCHEDULES}
    times = {name: [] for name in steps}
    for _ in range(_ROUNDS.value):
        for name, (run, _) in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
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
