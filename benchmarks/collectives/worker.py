"""Measures all algorithms for one number of devices, in a process of its own.

As many inter-op threads as devices are an option of a process, hence one for
each number of devices.
"""

import json
import sys
import time

import tensorflow as tf

from tfscale import collectives
from tfscale import use_virtual_devices
from tfscale.collectives.execute import execute
from tfscale.collectives.planning.algorithms import ALGORITHMS
from tfscale.collectives.planning.choosing import in_process

# A turn is as many calls as take about this long.
_SECONDS_OF_A_TURN = 0.1
# What a step takes that exchanges nothing.
_WITHOUT = "without"


def main():
    config = json.loads(sys.argv[1])
    num_devices, operation = config["devices"], config["operation"]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    # As the steps of `fit` under a `MeshStrategy` run.
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    use_virtual_devices(num_devices)
    rows = [
        _row(operation, num_devices, num_bytes, config["rounds"])
        for num_bytes in config["sizes"]
    ]
    print(json.dumps(rows))


def _row(operation, num_devices, num_bytes, rounds):
    plans = {
        name: make(operation, num_devices)
        for name, make in ALGORITHMS.items()
        if operation == "all_reduce" or name == "direct"
    }
    simulations = {
        name: collectives.simulate(plan, num_bytes, in_process())
        for name, plan in plans.items()
    }
    tensors = _tensors(operation, num_devices, num_bytes)
    steps = {name: _step(plan, tensors) for name, plan in plans.items()}
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
        "predicted": {n: s.makespan for n, s in simulations.items()},
        "sent": {n: max(s.bytes_sent) for n, s in simulations.items()},
        "chosen": collectives.choose(operation, num_devices, num_bytes).name,
    }


def _tensors(operation, num_devices, num_bytes):
    """What each device begins with; rows that all numbers of devices divide."""
    count = num_bytes // 4
    if operation == "all_gather":
        count //= num_devices
    if operation == "reduce_scatter":
        count = -(-count // num_devices) * num_devices
    tensors = []
    for device in tf.config.list_logical_devices("CPU"):
        with tf.device(device.name):
            value = tf.random.stateless_uniform([count], [0, len(tensors)])
            tensors.append(tf.Variable(value))
    return tensors


def _step(plan, variables):
    @tf.function(autograph=False)
    def step():
        values = []
        for variable in variables:
            with tf.device(variable.device):
                values.append(variable.read_value())
        # An element of each result, so that it is made, and no more of it, so
        # that nothing else is measured.
        first = []
        if plan is not None:
            values = execute(plan, values)
        for value in values:
            if value is not None:
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
