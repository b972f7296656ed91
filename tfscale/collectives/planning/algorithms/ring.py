"""Each to the next one: as little as can be is sent, in many rounds."""

from tfscale.collectives.planning.algorithms.pattern import Pattern
from tfscale.collectives.planning.algorithms.pattern import plan_of
from tfscale.collectives.planning.algorithms.pattern import rounds_of
from tfscale.collectives.planning.algorithms.pattern import same
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.send import Send


def ring(
    operation: str, num_devices: int, *, root: int | None = None
) -> CollectivePlan:
    """Each device gets from the one before and sends to the one after.

    Its all-reduce, a reduce-scatter and an all-gather, sends as little as any
    and all links are busy all the time, in 2 (n - 1) rounds::

        device 0  0>1+3  0>1+2  0>1+1  0>1:0  0>1:3  0>1:2
        device 1  1>2+0  1>2+3  1>2+2  1>2:1  1>2:0  1>2:3
        ...

    A broadcast goes along it as a chain, chunk after chunk.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = ring("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (6, 4, (6, 6, 6, 6))
    """
    return plan_of("ring", RING, operation, num_devices, root)


def _chain_broadcast(count):
    # Device d passes chunk c on in round d + c.
    rounds = [[] for _ in range(2 * count - 2)]
    for device in range(count - 1):
        for chunk in range(count):
            rounds[device + chunk].append(Send(device, device + 1, chunk))
    return rounds_of(rounds)


def _ring_gather(count):
    # In round r device d passes on the chunk that began r devices behind it.
    return rounds_of(
        [
            [Send(d, d - 1, d + r) for d in range(1, count - r)]
            for r in range(count - 1)
        ]
    )


def _ring_all_gather(count):
    return rounds_of(
        [
            [Send(d, (d + 1) % count, (d - r) % count) for d in range(count)]
            for r in range(count - 1)
        ]
    )


def _ring_reduce_scatter(count):
    # All-gather backwards would go round the other way.
    return rounds_of(
        [
            [
                Send(d, (d + 1) % count, (d - r - 1) % count, True)
                for d in range(count)
            ]
            for r in range(count - 1)
        ]
    )


RING = Pattern(
    _chain_broadcast,
    same,
    _ring_gather,
    _ring_all_gather,
    _ring_reduce_scatter,
)
