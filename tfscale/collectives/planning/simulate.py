"""Predicts when each send of a plan begins and ends, before anything runs."""

import dataclasses
import math

from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.costs import Costs


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The prediction of `simulate`: seconds, and bytes of each device."""

    plan: CollectivePlan
    makespan: float
    bytes_sent: tuple[float, ...]
    bytes_received: tuple[float, ...]


def simulate(
    plan: CollectivePlan, num_bytes: float, costs: Costs
) -> Simulation:
    """Plays a plan through.

    No device waits for a round to end: it sends as soon as it has what it has
    to send and its port is free, in the order of the rounds. Where devices
    share cores, work is given to them in the order of the rounds too.

    Args:
        plan: What to play through.
        num_bytes: Size of the whole tensor: what a device has of it before a
            reduce-scatter, or after an all-gather.
        costs: What links and devices take.

    Returns:
        A `Simulation`, in seconds.

    Raises:
        ValueError: If the size is negative or infinite.

    Example: a `two_shot` takes 2 (latency + (n - 1) / n S / B).

    >>> from tfscale.collectives.planning.algorithms import two_shot
    >>> costs = Costs(latency=1e-3, bandwidth=1e9)
    >>> simulation = simulate(two_shot("all_reduce", 4), 400e6, costs)
    >>> round(simulation.makespan, 6)
    0.602
    """
    if not 0 <= num_bytes < math.inf:
        raise ValueError(
            "`num_bytes` must be finite and not negative. Received: "
            f"num_bytes={num_bytes}."
        )
    chunk_bytes = num_bytes / plan.num_chunks
    clock = _Clock(plan, costs, chunk_bytes)
    for sends in plan.rounds:
        # In the order in which the first chunk of each stands in the round.
        of_links = {}
        for send in sends:
            of_links.setdefault((send.source, send.target), []).append(send)
        arrived = []
        for of_link in of_links.values():
            end = clock.transfer(of_link)
            arrived += [(send, end) for send in of_link]
        clock.arrive(arrived)
    return Simulation(
        plan,
        clock.finish(),
        bytes_sent=tuple(chunk_bytes * n for n in plan.chunks_sent),
        bytes_received=tuple(chunk_bytes * n for n in plan.chunks_received),
    )


class _Clock:
    """When chunks are there, and when ports and cores are free."""

    def __init__(self, plan, costs, chunk_bytes):
        self._plan, self._costs, self._bytes = plan, costs, chunk_bytes
        count = plan.num_devices
        self._out, self._in = [0.0] * count, [0.0] * count
        # Which cores a device has: some of its own, or all that there are.
        if costs.num_cores is None:
            self._cores = [[0.0] for _ in range(count)]
        else:
            self._cores = [[0.0] * costs.num_cores] * count
        self._there = {}
        self._cut()

    def transfer(self, sends):
        """When a message is there."""
        source, target = sends[0].source, sends[0].target
        size = self._bytes * len(sends)
        link = size / self._costs.bandwidth_of(source, target)
        ready = max(self._when(source, send.chunk) for send in sends)
        ready = self._work(target, ready, 0)
        start = max(ready, self._out[source])
        self._out[source] = start + link
        self._in[target] = max(start, self._in[target]) + link
        return self._in[target] + self._costs.latency_of(source, target)

    def arrive(self, arrived):
        """Stores and adds what has come in one round."""
        sums = {}
        new = {}
        for send, end in arrived:
            if send.adds:
                sums.setdefault((send.target, send.chunk), []).append(end)
            else:
                new[send.target, send.chunk] = end
        # The chunk that is there first is added up first.
        for (target, chunk), ends in sorted(
            sums.items(), key=lambda item: max(item[1])
        ):
            ready = max(*ends, self._when(target, chunk))
            # Reads all that arrived and its own, and writes the sum.
            size = self._bytes * (len(ends) + 2)
            new[target, chunk] = self._work(target, ready, size)
        self._there |= new

    def finish(self):
        """When the last device has its result, put together."""
        plan, end = self._plan, max([0.0, *self._there.values()])
        if plan.num_chunks == 1 or plan.operation == "reduce_scatter":
            return end
        size = 2 * self._bytes * plan.num_chunks
        devices = range(plan.num_devices)
        if plan.operation == "reduce":
            devices = [0]
        chunks = range(plan.num_chunks)
        ready = [(max(self._when(d, c) for c in chunks), d) for d in devices]
        for when, device in sorted(ready):
            end = max(end, self._work(device, when, size))
        return end

    def _cut(self):
        plan = self._plan
        if plan.num_chunks == 1 or plan.operation == "all_gather":
            return
        for device in range(plan.num_devices):
            end = self._work(device, 0.0, 0)
            for chunk in range(plan.num_chunks):
                self._there[device, chunk] = end

    def _work(self, device, ready, size):
        """When a core has read and written some bytes for a device."""
        busy = self._costs.overhead + size / self._costs.memory_bandwidth
        cores = self._cores[device]
        # Of cores that are free by then the one that is so for the least time.
        core = max(
            range(len(cores)), key=lambda i: (-max(cores[i], ready), cores[i])
        )
        end = max(ready, cores[core]) + busy
        if busy:
            cores[core] = end
        return end

    def _when(self, device, chunk):
        return self._there.get((device, chunk), 0.0)
