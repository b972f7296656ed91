"""Partners exchange halves, quarters, ... and back (Rabenseifner)."""

from tfscale.collectives.planning import building
from tfscale.collectives.planning.algorithms.pattern import Pattern
from tfscale.collectives.planning.algorithms.pattern import distances
from tfscale.collectives.planning.algorithms.pattern import plan_of
from tfscale.collectives.planning.algorithms.pattern import rounds_of
from tfscale.collectives.planning.algorithms.pattern import same
from tfscale.collectives.planning.algorithms.tree import tree_gather
from tfscale.collectives.planning.building import Rounds
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.send import Send


def halving_doubling(
    operation: str, num_devices: int, *, root: int | None = None
) -> CollectivePlan:
    """Partners exchange ever less, then ever more (Rabenseifner's).

    A reduce-scatter halves what is exchanged from round to round, an
    all-gather doubles it; an all-reduce is both, a broadcast a scatter and an
    all-gather, a reduce the same backwards. Devices above the largest power of
    two have a partner to exchange for them.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = halving_doubling("all_reduce", 8)
    >>> plan.num_rounds, plan.num_chunks, set(plan.chunks_sent)
    (6, 8, {14})
    """
    name, pattern = "halving_doubling", HALVING_DOUBLING
    if operation == "all_reduce":
        checked_root(operation, num_devices, root)
        return CollectivePlan(
            operation,
            num_devices,
            _largest_power(num_devices),
            _halving_doubling_all_reduce(num_devices),
            name=name,
        )
    return plan_of(name, pattern, operation, num_devices, root)


def _doubling_all_gather(count):
    """In each round partners exchange all that they have.

    They are twice as far from each other as in the round before. Devices above
    the largest power of two leave their chunk to a partner, and get the rest
    from it at the end.
    """
    power = _largest_power(count)
    chunks = {d: [c for c in (d, power + d) if c < count] for d in range(power)}
    before = [[Send(e, e - power, e) for e in range(power, count)]]
    core = [
        [
            Send(device, device ^ distance, chunk)
            for device in range(power)
            for chunk in range(power)
            if chunk // distance == device // distance
        ]
        for distance in distances(power)
    ]
    after = [
        [
            Send(e - power, e, chunk)
            for e in range(power, count)
            for chunk in range(count)
            if chunk != e
        ]
    ]
    core = building.on(core, range(power), chunks)
    return rounds_of(before + core + after)


def _scattered_broadcast(count):
    # Van de Geijn: scatter, then all-gather.
    scatter = building.backwards(tree_gather(count), adds=False)
    there = [(0, chunk) for chunk in range(count)]
    return building.without_needless(
        scatter + _doubling_all_gather(count), there
    )


def _halving_doubling_all_reduce(count: int) -> Rounds:
    """Rabenseifner's, in as many chunks as the largest power of two.

    Devices above it give all that they have to a partner first, and get the
    sums from it last.
    """
    power = _largest_power(count)
    extras = range(power, count)
    gathered = _doubling_all_gather(power)

    def moved(adds):
        return [
            [
                Send(e, e - power, chunk, True)
                if adds
                else Send(e - power, e, chunk)
                for e in extras
                for chunk in range(power)
            ]
        ]

    core = building.backwards(gathered, adds=True) + gathered
    return rounds_of(moved(True) + core + moved(False))


def _largest_power(count: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (count.bit_length() - 1)


HALVING_DOUBLING = Pattern(
    _scattered_broadcast, same, tree_gather, _doubling_all_gather
)
