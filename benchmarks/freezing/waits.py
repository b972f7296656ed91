"""Two stages with half of the layers frozen: cut in halves, and cut by cost.

    python -m benchmarks.freezing.waits

Actions wait in place of computing, as long as their layers cost: a forward, a
gradient of inputs and one of weights are a unit each. So a stage cannot use the
core of another one that waits, which virtual CPU devices otherwise do.
"""

import statistics

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from benchmarks.pipeline.waiting import seconds_in_turns
from benchmarks.pipeline.waiting import waiting_step

_LAYERS = flags.DEFINE_integer("layers", 24, "Layers, of which half is frozen.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 16, "Of a step.")
_UNIT = flags.DEFINE_float("unit", 0.004, "Seconds of a layer's forward.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Steps of each cut.")


def make_step(strategy, balance):
    """A function that runs a step, and the layers of its first stage."""
    keras.utils.clear_session()
    half = _LAYERS.value // 2
    with strategy.scope():
        layers = [
            keras.layers.Dense(2, name=f"d{number}", trainable=number >= half)
            for number in range(_LAYERS.value)
        ]
        model = tfscale.PipelineModel(
            keras.Sequential([keras.Input((2,)), *layers]),
            _MICROBATCHES.value,
            balance=balance,
        )
        model.compile("sgd", "mse")
    first = len(model.plan.stages[0].calls)
    stages = [range(first), range(first, _LAYERS.value)]
    # The first trainable layer needs no gradient of its inputs.
    begin = {"F": 0, "B": half + 1, "W": half}

    def seconds(action):
        numbers = stages[action.stage]
        return _UNIT.value * sum(x >= begin[action.kind] for x in numbers)

    rows = 2 * _MICROBATCHES.value
    return waiting_step(model, strategy, seconds, rows), first


def main(_):
    tf.config.threading.set_inter_op_parallelism_threads(8)
    tfscale.use_virtual_devices(2)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    middle = [f"d{_LAYERS.value // 2}"]
    steps = {
        "in halves": make_step(strategy, middle),
        "by cost": make_step(strategy, "flops"),
    }
    runs = {name: run for name, (run, _) in steps.items()}
    times = seconds_in_turns(runs, _ROUNDS.value)
    for name, (_, first) in steps.items():
        ratios = [a / b for a, b in zip(times["in halves"], times[name])]
        print(
            f"cut {name}, {first} | {_LAYERS.value - first}: "
            f"{statistics.median(times[name]):.3f} s, "
            f"{statistics.median(ratios):.2f} times as fast"
        )


if __name__ == "__main__":
    app.run(main)
