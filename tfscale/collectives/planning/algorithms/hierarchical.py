"""Rings or trees inside of machines, and between them."""

from tfscale.collectives.planning import building
from tfscale.collectives.planning.algorithms.pattern import Pattern
from tfscale.collectives.planning.algorithms.pattern import plan_of
from tfscale.collectives.planning.algorithms.ring import RING
from tfscale.collectives.planning.algorithms.tree import TREE
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import checked_root


def hierarchical(
    operation: str,
    num_devices: int,
    *,
    devices_per_machine: int,
    root: int | None = None,
) -> CollectivePlan:
    """Inside of each machine, then between machines, then inside again.

    What has a root goes over trees, the others over rings, of the devices of a
    machine and of those with one index in all machines. Between m machines of
    g devices, each device sends 2 (m - 1) / m of S / g to other machines.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices; those of a machine follow each other.
        devices_per_machine: Number of devices of each machine.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be, or if
            machines do not have equally many devices.

    >>> plan = hierarchical("all_reduce", 8, devices_per_machine=4)
    >>> sends = [send for sends in plan.rounds for send in sends]
    >>> sum(s.source // 4 != s.target // 4 for s in sends), plan.num_chunks
    (16, 8)
    """
    checked_root(operation, num_devices, root)
    if devices_per_machine < 1 or num_devices % devices_per_machine:
        fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            "All machines must have equally many devices. Received: "
            f"num_devices={num_devices}, devices_per_machine="
            f"{devices_per_machine}. Take one of {fits} for the latter."
        )
    pattern = _two_levels(devices_per_machine)
    return plan_of(
        "hierarchical",
        pattern,
        operation,
        num_devices,
        root,
        devices_per_machine,
    )


def _two_levels(size):
    """The pattern of machines with so many devices each."""

    def machines(count):
        return [range(m, m + size) for m in range(0, count, size)]

    def alike(count):
        return [range(index, count, size) for index in range(size)]

    def broadcast(count):
        leaders = alike(count)[0]
        between = building.on(TREE.broadcast(len(leaders)), leaders)
        inside = TREE.broadcast(size)
        return between + building.beside(
            building.on(inside, devices) for devices in machines(count)
        )

    def gather(count):
        leaders = alike(count)[0]
        inside = TREE.gather(size)
        between = building.on(
            TREE.gather(len(leaders)),
            leaders,
            dict(enumerate(machines(count))),
        )
        return (
            building.beside(
                building.on(inside, of, {i: [d] for i, d in enumerate(of)})
                for of in machines(count)
            )
            + between
        )

    def all_gather(count):
        between = building.beside(
            building.on(
                RING.all_gather(len(of)),
                of,
                {i: [d] for i, d in enumerate(of)},
            )
            for of in alike(count)
        )
        inside = building.beside(
            building.on(
                RING.all_gather(size),
                devices,
                dict(enumerate(alike(count))),
            )
            for devices in machines(count)
        )
        return between + inside

    return Pattern(broadcast, lambda count: 1, gather, all_gather)
