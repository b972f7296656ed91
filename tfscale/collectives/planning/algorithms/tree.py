"""Binomial trees: in each round twice as many devices have it."""

from tfscale.collectives.planning import building
from tfscale.collectives.planning.algorithms.pattern import Pattern
from tfscale.collectives.planning.algorithms.pattern import distances
from tfscale.collectives.planning.algorithms.pattern import one
from tfscale.collectives.planning.algorithms.pattern import plan_of
from tfscale.collectives.planning.algorithms.pattern import rounds_of
from tfscale.collectives.planning.building import Rounds
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.send import Send


def tree(
    operation: str, num_devices: int, *, root: int | None = None
) -> CollectivePlan:
    """A binomial tree: in each round twice as many devices have it.

    An all-reduce is a reduce and a broadcast, an all-gather a gather and a
    broadcast.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> for sends in tree("broadcast", 8).rounds:
    ...     print(*sends)
    0>4:0
    0>2:0 4>6:0
    0>1:0 2>3:0 4>5:0 6>7:0
    """
    if operation == "all_reduce":
        checked_root(operation, num_devices, root)
        broadcast = TREE.broadcast(num_devices)
        rounds = building.backwards(broadcast, adds=True) + broadcast
        return CollectivePlan(operation, num_devices, 1, rounds, name="tree")
    return plan_of("tree", TREE, operation, num_devices, root)


def _tree_broadcast(count: int) -> Rounds:
    """All of it, from device 0."""
    # With 8 devices: 0>4; 0>2 4>6; 0>1 2>3 4>5 6>7.
    return rounds_of(
        [
            [
                Send(device, device + distance, 0)
                for device in range(0, count - distance, 2 * distance)
            ]
            for distance in reversed(distances(count))
        ]
    )


def tree_gather(count: int) -> Rounds:
    """Chunk d of device d, to device 0."""
    # With 8 devices: 1>0 3>2 5>4 7>6; 2>0 6>4; 4>0, with all that they have.
    return rounds_of(
        [
            [
                Send(device + distance, device, chunk)
                for device in range(0, count - distance, 2 * distance)
                for chunk in range(
                    device + distance, min(device + 2 * distance, count)
                )
            ]
            for distance in distances(count)
        ]
    )


def _tree_all_gather(count):
    gather = tree_gather(count)
    broadcast = building.on(
        _tree_broadcast(count), range(count), {0: range(count)}
    )
    # Who has passed a chunk on to the root does not get it again.
    there = [(device, device) for device in range(count)]
    return building.without_needless(gather + broadcast, there)


TREE = Pattern(_tree_broadcast, one, tree_gather, _tree_all_gather)
