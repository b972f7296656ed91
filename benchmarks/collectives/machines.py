"""All-reduces between machines: each algorithm beside the one that is chosen.

    python -m benchmarks.collectives.machines --machines=2 --devices=4

Each machine is a process of this one, whose devices a coordinator uses; between
them are wires with a latency and a bandwidth (`slow_links.py`). A time is that
of a step with an all-reduce less that of one without, the median of some rounds
in which the algorithms take turns.
"""

import contextlib
import functools
import socket
import statistics
import time

import tensorflow as tf
from absl import app
from absl import flags

from benchmarks import processes
from tfscale.collectives import algorithms
from tfscale.collectives import links
from tfscale.collectives import operations

_MACHINES = flags.DEFINE_integer("machines", 2, "How many.", 2)
_DEVICES = flags.DEFINE_integer("devices", 2, "Of each machine.", 1)
_LATENCY = flags.DEFINE_float("latency_ms", 2.0, "Of a link.", 0.0)
_RATE = flags.DEFINE_float("mb_per_s", 50.0, "Of a machine's wire.", 0.0)
_SIZES = flags.DEFINE_list("kib", ["4", "256", "4096"], "KiB of the tensor.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each takes its turn.", 1)


def main(argv):
    del argv
    addresses = _free_addresses(2 * _MACHINES.value + 1)
    coordinator, *addresses = addresses
    wires, machines = addresses[::2], addresses[1::2]
    with contextlib.ExitStack() as stack:

        def start(module, **config):
            process = processes.Turns(
                f"benchmarks.collectives.{module}", config
            )
            stack.callback(process.end)
            process.answer()

        start(
            "slow_links",
            links=list(zip(wires, machines)),
            seconds=_LATENCY.value / 1e3,
            bytes_per_second=_RATE.value * 1e6,
        )
        tasks = [coordinator, *wires]
        for task, address in enumerate(machines, 1):
            own = [*tasks[:task], address, *tasks[task + 1 :]]
            start("machine", tasks=own, task=task, devices=_DEVICES.value)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({"worker": tasks}),
            job_name="worker",
            task_index=0,
            protocol="grpc",
        )
        _measure()


def _measure():
    devices = [
        f"/job:worker/replica:0/task:{1 + machine}/device:CPU:{index}"
        for machine in range(_MACHINES.value)
        for index in range(_DEVICES.value)
    ]
    first, second = (devices[i * _DEVICES.value] for i in range(2))
    costs = links.costs((first, second))
    print(
        f"links as measured: {1e3 * costs.latency:.2f} ms, "
        f"{costs.bandwidth / 1e6:.0f} MB/s\n"
    )
    plans = algorithms.ALL_REDUCE | {
        "hierarchical": functools.partial(
            algorithms.two_shot, machine=_DEVICES.value
        ),
        "auto": operations.all_reduce,
    }
    print("ms of an all-reduce\n\n| KiB | " + " | ".join(plans), end=" |")
    print(" chosen | over the fastest |\n" + "|---" * (len(plans) + 3) + "|")
    for kib in map(int, _SIZES.value):
        steps = {name: _step(devices, kib, p) for name, p in plans.items()}
        steps[None] = _step(devices, kib, None)
        times = {name: [] for name in steps}
        for number in range(_ROUNDS.value + 2):
            for name, step in steps.items():
                begin = time.perf_counter()
                for value in step():
                    value.numpy()
                if number > 1:  # one traces, one connects
                    times[name].append(time.perf_counter() - begin)
        without = statistics.median(times.pop(None))
        medians = {n: statistics.median(t) - without for n, t in times.items()}
        cells = [f"{1e3 * median:.1f}" for median in medians.values()]
        chosen = _chosen(devices, kib)
        ratio = medians[chosen] / min(medians[name] for name in medians)
        cells += [chosen, f"{ratio:.2f}"]
        print(f"| {kib} | " + " | ".join(cells) + " |", flush=True)


def _chosen(devices, kib):
    if _DEVICES.value > 1:
        return "hierarchical"
    with tf.Graph().as_default():
        tensors = []
        for device in devices:
            with tf.device(device):
                tensors.append(tf.zeros([kib * 256]))
        return operations.fastest(tensors)


def _step(devices, kib, plan):
    variables = []
    for device in devices:
        with tf.device(device):
            variables.append(tf.Variable(tf.ones([kib * 256])))

    @tf.function(autograph=False)
    def step():
        values = []
        for device, variable in zip(devices, variables, strict=True):
            with tf.device(device):
                values.append(2.0 * variable)
        if plan is not None:
            values = plan(values)
        ends = []
        for device, value in zip(devices, values, strict=True):
            with tf.device(device):
                ends.append(tf.reduce_max(value))
        return ends

    return step


def _free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [f"localhost:{one.getsockname()[1]}" for one in sockets]


if __name__ == "__main__":
    app.run(main)
