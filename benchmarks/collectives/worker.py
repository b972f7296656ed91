"""Measures all algorithms for one number of devices, in a process of its own.

As many inter-op threads as devices are an option of a process, hence one for
each number of devices.
"""

import json
import sys
import time

import tensorflow as tf

from tfscale import use_virtual_devices
from tfscale.collectives import costs
from tfscale.collectives.algorithms import ALL_REDUCE

# A turn is as many calls as take about this long.
_SECONDS_OF_A_TURN = 0.1
# What a step takes that exchanges nothing.
_WITHOUT = "without"


def main():
    config = json.loads(sys.argv[1])
    num_devices = config["devices"]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    # As the steps of `fit` under a `MeshStrategy` run.
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    use_virtual_devices(num_devices)
    rows = [
        _row(num_devices, num_bytes, config["rounds"])
        for num_bytes in config["sizes"]
    ]
    print(json.dumps(rows))


def _row(num_devices, num_bytes, rounds):
    model = costs.in_process()
    tensors = _tensors(num_bytes)
    steps = {name: _step(make, tensors) for name, make in ALL_REDUCE.items()}
    steps[_WITHOUT] = _step(None, tensors)
    calls = {name: _calls_of_a_turn(step) for name, step in steps.items()}
    measured = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            measured[name].append(_time(step, calls[name]))
    return {
        "bytes": num_bytes,
        "without": measured.pop(_WITHOUT),
        "measured": measured,
        "predicted": costs.seconds(model, num_devices, num_bytes),
        "chosen": costs.fastest(model, num_devices, num_bytes),
    }


def _tensors(num_bytes):
    """What each device begins with."""
    tensors = []
    for device in tf.config.list_logical_devices("CPU"):
        with tf.device(device.name):
            value = tf.random.stateless_uniform(
                [num_bytes // 4], [0, len(tensors)]
            )
            tensors.append(tf.Variable(value))
    return tensors


def _step(all_reduce, variables):
    @tf.function(autograph=False)
    def step():
        values = []
        for variable in variables:
            with tf.device(variable.device):
                values.append(variable.read_value())
        # An element of each result, so that it is made, and no more of it, so
        # that nothing else is measured.
        first = []
        if all_reduce is not None:
            values = all_reduce(values)
        for value in values:
            with tf.device(value.device):
                first.append(value[0])
        return first

    return step


def _calls_of_a_turn(step):
    for _ in range(3):  # traces, and warms up
        _time(step, 1)
    return max(1, min(100, round(_SECONDS_OF_A_TURN / _time(step, 1))))


def _time(step, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        for value in step():
            value.numpy()
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    main()
