"""Plans whose stages wait in place of computing, beside what is predicted.

    python -m benchmarks.planner.waits

Few cores carry many devices, and their load hardly counts. What is measured is
what meshes of replicas and stages, schedules and microbatches do, not products.
"""

import dataclasses
import itertools
import statistics

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline.waiting import seconds_in_turns
from benchmarks.pipeline.waiting import waiting_step
from benchmarks.planner import comparison
from tfscale.planner import DEVICES

_DEVICES = flags.DEFINE_integer("devices", 4, "Virtual devices.")
_PLANS = flags.DEFINE_integer("plans", 12, "How many plans.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Steps of each plan.")
_SECONDS = flags.DEFINE_float("seconds", 4.0, "Of a step on one device.")
_WIDTHS = (8, 8, 16, 8, 8, 16, 16, 8, 8, 16, 8, 8)
_BATCH_SIZE = 32


def build_model():
    """Layers of unlike cost: stages cannot be equal."""
    layers = [keras.layers.Dense(width) for width in _WIDTHS]
    return keras.Sequential([keras.Input((8,)), *layers])


def make_step(plan, flops):
    """A function that runs a step of a plan on devices of so many FLOP/s."""
    keras.utils.clear_session()
    s = plan.settings
    strategy = plan.strategy()
    with strategy.scope():
        model = plan.wrap(build_model())
        if not isinstance(model, tfscale.PipelineModel):
            model = tfscale.PipelineModel(model, num_microbatches=1)
        model.compile("sgd", "mse")
    forward, backward, weight = model.plan.stage_costs
    rows = _BATCH_SIZE // s.data

    def seconds(action):
        work = {
            "F": forward[action.stage],
            "W": weight[action.stage],
            "B": backward[action.stage] - weight[action.stage],
        }[action.kind]
        if action.kind == "B" and s.recompute:
            work += forward[action.stage]
        return work * rows / s.num_microbatches / flops

    return waiting_step(model, strategy, seconds, rows)


def main(_):
    tf.config.threading.set_inter_op_parallelism_threads(4 * _DEVICES.value)
    tfscale.use_virtual_devices(_DEVICES.value)
    widths = (8, *_WIDTHS)
    products = sum(2 * a * b for a, b in itertools.pairwise(widths))
    flops = 3 * _BATCH_SIZE * products / _SECONDS.value
    # Nothing but products takes time.
    free = dict.fromkeys(
        ("memory_bandwidth", "link_bandwidth", "network_bandwidth"), 1e30
    )
    device = dataclasses.replace(
        DEVICES["A100"],
        **free,
        float32_flops=flops,
        efficiency=1.0,
        startup=0,
        latency=0,
    )
    plans = [
        plan
        for plan in tfscale.plan(
            build_model,
            num_devices=_DEVICES.value,
            batch_size=_BATCH_SIZE,
            device=device,
        )
        if plan.settings.model == 1 and not plan.settings.zero_stage
    ]
    chosen = comparison.spread(plans, _PLANS.value)
    runs = {number: make_step(x, flops) for number, x in enumerate(chosen)}
    times = seconds_in_turns(runs, _ROUNDS.value).values()
    comparison.print_table(chosen, [statistics.median(each) for each in times])


if __name__ == "__main__":
    app.run(main)
