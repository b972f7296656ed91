"""The time of each algorithm of an all-reduce, and so which one is chosen."""

import math
import os
from typing import NamedTuple


class Costs(NamedTuple):
    """Time of links between devices, and of their work.

    Attributes:
        latency: Seconds between the end of a message and its use.
        bandwidth: Of what a device sends, and of what it gets, in bytes per
            second.
        memory_bandwidth: Bytes per second that a core reads and writes. A sum
            of k tensors reads k and writes one; to put a tensor together reads
            and writes all of it. A part is a view.
        overhead: Seconds for which a message, a cut, a sum and a join each
            keep a core busy (o of LogP).
        num_cores: How many cores do the work of all devices; None for one each.

    Source of the terms: Culler et al., LogP: towards a realistic model of
    parallel computation (1993).
    """

    latency: float
    bandwidth: float
    memory_bandwidth: float
    overhead: float = 0.0
    num_cores: int | None = None


def in_process() -> Costs:
    """Devices of one process whose memory is that of the host.

    Nothing is sent: the device that sums reads what the others have. The cost
    is that of bytes read and written, and of operations, each on one core.

    By processor time on a virtual machine with AVX-512, TensorFlow 2.21, 2 to 8
    devices: sums and joins of 1 to 64 MiB went over 17 to 30 GB of memory in a
    second of a core, and at 1 KiB a message, a cut, a sum or a join took 3 to 6
    us each.
    """
    return Costs(5e-6, math.inf, 22e9, 5e-6, _usable_cores())


def seconds(costs: Costs, n: int, num_bytes: float) -> dict[str, float]:
    """How long each algorithm takes to add up a tensor of each of n devices.

    >>> network = Costs(1e-5, 1e9, 22e9)
    >>> {name: round(1e3 * t) for name, t in seconds(network, 8, 64e6).items()}
    {'direct': 474, 'two_shot': 121, 'parameter_server': 922}
    """
    a, o = costs.latency, costs.overhead
    send, touch = (
        num_bytes / costs.bandwidth,
        num_bytes / costs.memory_bandwidth,
    )

    def turns(tasks):
        return math.ceil(tasks / (costs.num_cores or n))

    each = (2 * n + 1) * o + ((n + 1) / n + 2) * touch
    return {
        "direct": a + (n - 1) * send + turns(n) * (n * o + (n + 1) * touch),
        "two_shot": 2 * (a + (n - 1) / n * send) + turns(n) * each,
        "parameter_server": 2 * (a + (n - 1) * send + turns(n - 1) * o)
        + o
        + (n + 1) * touch,
    }


def fastest(costs: Costs, num_devices: int, num_bytes: float) -> str:
    """The algorithm that should take the least time; `direct` if in doubt.

    >>> fastest(Costs(1e-5, 1e9, 22e9), 8, 64 << 20)
    'two_shot'
    >>> fastest(Costs(1e-5, 1e9, 22e9), 8, 1024)
    'direct'
    """
    times = seconds(costs, num_devices, num_bytes)
    # Of two that differ by rounding only the first has fewer rounds.
    return min(times, key=lambda name: round(times[name], 12))


def _usable_cores():
    # Not all systems can keep a process to some of the cores.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
