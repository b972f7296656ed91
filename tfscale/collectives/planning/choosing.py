"""Which algorithm is the fastest for an operation, by the cost model."""

import functools
import math

from tfscale.collectives.planning.algorithms import ALGORITHMS
from tfscale.collectives.planning.algorithms import ALL_REDUCE_ONLY
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.costs import Costs
from tfscale.collectives.planning.plan import Plan
from tfscale.collectives.planning.simulate import simulate

# Devices of one process whose memory is that of the host, one core each.
# Nothing is sent: who adds up reads what the others have. One round more, which
# is operations that cut, wait and put together, costs 0.2 ms.
#
# Measured on 2 cores of a virtual machine with AVX-512, TensorFlow 2.21, by
# processor time per device: to add up 64 MiB each from 2, 4 and 8 devices took
# 11, 28 and 50 ms, which is 12 to 18 GB/s read and written; `two_shot` took as
# long as `direct` at 1 MiB, with 4 devices and with 8.
IN_PROCESS = Costs(latency=2e-4, bandwidth=math.inf, memory_bandwidth=13e9)


@functools.lru_cache(maxsize=4096)
def choose(
    operation: str,
    num_devices: int,
    num_bytes: float,
    *,
    costs: Costs = IN_PROCESS,
    root: int | None = None,
) -> Plan:
    """The plan that should take the least time.

    Args:
        operation: See `Plan`.
        num_devices: Number of devices.
        num_bytes: Size of the whole tensor, see `simulate`.
        costs: What links and devices take; by default virtual devices of one
            process, as measured.
        root: For a broadcast, reduce or gather; by default device 0.

    Returns:
        A plan of one of the algorithms that need no more than the number of
        devices (all but `hierarchical`); of several that take equally long the
        one with the fewest rounds.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    Example: in one process two devices add up for themselves, and from three
    on each one adds up a part for all, unless the tensor is small.

    >>> [choose("all_reduce", n, 64 << 20).name for n in (2, 4, 8)]
    ['direct', 'two_shot', 'two_shot']
    >>> choose("all_reduce", 8, 1024).name
    'direct'

    Over a network a broadcast of much is scattered first and then gathered.

    >>> network = Costs(latency=1e-5, bandwidth=1e9)
    >>> choose("broadcast", 8, 64 << 20, costs=network).name
    'halving_doubling'
    >>> choose("broadcast", 8, 1024, costs=network).name
    'direct'
    """
    root = checked_root(operation, num_devices, root)
    plans = [
        _make(algorithm, operation, num_devices, root)
        for algorithm in ALGORITHMS
    ]
    return min(
        (plan for plan in plans if plan),
        key=lambda plan: (
            simulate(plan, num_bytes, costs).makespan,
            plan.num_rounds,
        ),
    )


@functools.lru_cache
def _make(algorithm, operation, num_devices, root):
    make = ALGORITHMS[algorithm]
    if algorithm not in ALL_REDUCE_ONLY:
        return make(operation, num_devices, root=root)
    return make(operation, num_devices) if operation == "all_reduce" else None
