"""Everybody with everybody, or with a server: one round, or two."""

from tfscale.collectives.planning import building
from tfscale.collectives.planning.algorithms.pattern import Pattern
from tfscale.collectives.planning.algorithms.pattern import one
from tfscale.collectives.planning.algorithms.pattern import plan_of
from tfscale.collectives.planning.algorithms.pattern import rounds_of
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.send import Send


def direct(
    operation: str, num_devices: int, *, root: int | None = None
) -> CollectivePlan:
    """Everybody sends to everybody who needs it, in one round.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = direct("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (1, 1, (3, 3, 3, 3))
    """
    if operation == "all_reduce":
        checked_root(operation, num_devices, root)
        # Each device gets the whole tensors of all others.
        rounds = [
            [send._replace(chunk=0, adds=True) for send in sends]
            for sends in DIRECT.all_gather(num_devices)
        ]
        return CollectivePlan(operation, num_devices, 1, rounds, name="direct")
    return plan_of("direct", DIRECT, operation, num_devices, root)


def two_shot(operation: str, num_devices: int) -> CollectivePlan:
    """A direct reduce-scatter, then a direct all-gather.

    Each device adds up one part and sends the sum to all others. Only for
    `"all_reduce"`; the name is that of the GPU kernels that do it.

    Args:
        operation: `"all_reduce"`.
        num_devices: Number of devices.

    Raises:
        ValueError: For an operation or a number that cannot be.

    >>> plan = two_shot("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (2, 4, (6, 6, 6, 6))
    """
    _check_is_all_reduce("two_shot", operation)
    return plan_of("two_shot", DIRECT, operation, num_devices, None)


def parameter_server(operation: str, num_devices: int) -> CollectivePlan:
    """Device 0 adds everything up and sends the sums to all others.

    Only for `"all_reduce"`. What device 0 gets and sends grows with the number
    of devices.

    Args:
        operation: `"all_reduce"`.
        num_devices: Number of devices, device 0 among them.

    Raises:
        ValueError: For an operation or a number that cannot be.

    >>> parameter_server("all_reduce", 4).chunks_received
    (3, 1, 1, 1)
    """
    _check_is_all_reduce("parameter_server", operation)
    checked_root(operation, num_devices, None)
    broadcast = DIRECT.broadcast(num_devices)
    rounds = building.backwards(broadcast, adds=True) + broadcast
    return CollectivePlan(
        operation, num_devices, 1, rounds, name="parameter_server"
    )


def _check_is_all_reduce(name, operation):
    if operation != "all_reduce":
        raise ValueError(
            f"`{name}` is an algorithm for 'all_reduce' only. Received: "
            f"{operation!r}. Take `direct`, of whose operations it is made."
        )


def _direct_broadcast(count):
    return rounds_of([[Send(0, device, 0) for device in range(1, count)]])


def _direct_gather(count):
    return rounds_of([[Send(device, 0, device) for device in range(1, count)]])


def _direct_all_gather(count):
    # Each to the next one first, so that nobody gets two chunks at once.
    sends = [
        Send(device, (device + distance) % count, device)
        for distance in range(1, count)
        for device in range(count)
    ]
    return rounds_of([sends])


DIRECT = Pattern(_direct_broadcast, one, _direct_gather, _direct_all_gather)
