"""The time of a message between machines, measured when first needed."""

import functools
import time

import tensorflow as tf

from tfscale.collectives import device_names
from tfscale.collectives.costs import Costs
from tfscale.collectives.costs import in_process

# A choice: well above the latency of a network, and below a second.
_BYTES = 1 << 20
_CALLS = 5


@functools.lru_cache(maxsize=256)
def costs(devices: tuple[str, ...]) -> Costs:
    """Costs between devices (`tf.Tensor.device`) of several machines.

    The first call for some machines sends them a few messages: a small one, and
    one of 1 MiB, goes from each machine to the next one. Links have their
    average, and are shared by all devices of a machine.
    """
    of_device = device_names.machines(devices)
    firsts = [of_device.index(machine) for machine in sorted(set(of_device))]
    with tf.init_scope():
        latency, bandwidth = _measured(tuple(devices[i] for i in firsts))
    most = max(map(of_device.count, of_device))
    return Costs(latency, bandwidth / most, in_process().memory_bandwidth)


@functools.lru_cache(maxsize=64)
def _measured(devices):
    small = _seconds(devices, 4, rounds=1)
    # Both contain the time of a call.
    latency = (_seconds(devices, 4, rounds=3) - small) / (2 * len(devices))
    large = (_seconds(devices, _BYTES, rounds=1) - small) / len(devices)
    return max(latency, 0.0), _BYTES / max(large, 1e-9)


def _seconds(devices, num_bytes, rounds):

    @tf.function(autograph=False)
    def send(x):
        for device in [*devices[1:], devices[0]] * rounds:
            with tf.device(device):
                x = x + 1.0
        return x[0]

    with tf.device(devices[0]):
        x = tf.zeros([num_bytes // 4])
    times = []
    for _ in range(1 + _CALLS):  # the first one traces
        begin = time.perf_counter()
        send(x).numpy()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
