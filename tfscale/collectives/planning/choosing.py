"""Which algorithm is the fastest for an operation, by the cost model."""

import functools
import math
import os

from tfscale.collectives.planning.algorithms import ALGORITHMS
from tfscale.collectives.planning.algorithms import direct
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.costs import Costs
from tfscale.collectives.planning.simulate import simulate


def in_process(num_cores: int | None = None) -> Costs:
    """Devices of one process whose memory is that of the host.

    Nothing is sent: the device that sums reads what the others have. The cost
    is that of bytes read and written, and of operations, each on one core.

    By processor time on a virtual machine with AVX-512, TensorFlow 2.21, 2 to 8
    devices: sums and joins of 1 to 64 MiB went over 17 to 30 GB of memory in a
    second of a core, and at 1 KiB a message, a cut, a sum or a join took 3 to 6
    us each.

    >>> in_process(num_cores=4).num_cores
    4
    """
    return Costs(
        latency=5e-6,
        bandwidth=math.inf,
        memory_bandwidth=22e9,
        overhead=5e-6,
        num_cores=num_cores or _usable_cores(),
    )


def choose(
    operation: str,
    num_devices: int,
    num_bytes: float,
    *,
    costs: Costs | None = None,
) -> CollectivePlan:
    """The plan that should take the least time.

    All that it chooses from add up all devices at once, in their order, so that
    the choice changes no digit.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        num_bytes: Size of the whole tensor, see `simulate`.
        costs: What links and devices take; by default those of virtual devices
            in this process, as measured, with the cores that it may use.

    Returns:
        A plan of one of the algorithms that need no more than the number of
        devices (all but `hierarchical`); of several that take equally long the
        one with the fewest rounds.

    Raises:
        ValueError: If the operation or a number is invalid.

    Example: over a network, much is cut into parts that each device adds up
    for all.

    >>> network = Costs(latency=1e-5, bandwidth=1e9)
    >>> choose("all_reduce", 8, 64 << 20, costs=network).name
    'two_shot'
    >>> choose("all_reduce", 8, 1024, costs=network).name
    'direct'

    In one process, where each of two devices has a core, both add up for
    themselves.

    >>> choose("all_reduce", 2, 64 << 20, costs=in_process(2)).name
    'direct'
    """
    return _fastest(operation, num_devices, num_bytes, costs or in_process())


@functools.lru_cache(maxsize=4096)
def _fastest(operation, num_devices, num_bytes, costs):
    return min(
        _plans(operation, num_devices),
        key=lambda plan: (
            simulate(plan, num_bytes, costs).makespan,
            plan.num_rounds,
        ),
    )


def _usable_cores():
    # Not all systems can keep a process to some of the cores.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.lru_cache
def _plans(operation, num_devices):
    if operation == "all_reduce":
        return [make(operation, num_devices) for make in ALGORITHMS.values()]
    return [direct(operation, num_devices)]
