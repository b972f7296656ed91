"""The algorithms that have a name: a function of the sizes for each.

With n devices, a tensor of S bytes, a latency a and a bandwidth B, an
all-reduce takes (where each device sends and gets S bytes in S / B, and
latencies of several sends overlap)

    direct               a              + (n - 1) S / B
    parameter_server     2 a            + 2 (n - 1) S / B
    two_shot             2 a            + 2 (n - 1) / n S / B

No algorithm sends less than 2 (n - 1) / n S from each device. These add up all
devices at once, in their order, so the choice between them changes no digit. A
ring and recursive halving send as little as `two_shot` in more rounds, a tree
more: where every device reaches every other one they are never faster.
`hierarchical` is for machines of several devices, which share a wire:

    machine 0   [0 1 2 3]     1. reduce-scatter inside of each machine
                 | | | |      2. all-reduce of each part between machines
    machine 1   [4 5 6 7]     3. all-gather inside of each machine

Sources: Li et al., Scaling distributed machine learning with the parameter
server (2014); Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH (2005), for the bounds; Goyal et al.,
Accurate, large minibatch SGD (2017), section 4, for two levels.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.send import Send


def direct(
    operation: str, num_devices: int, *, root: int | None = None
) -> CollectivePlan:
    """Each device sends to each that needs it, in one round.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.
        root: For a reduce; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = direct("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (1, 1, (3, 3, 3, 3))
    """
    root = checked_root(operation, num_devices, root)
    if operation != "all_reduce":
        return _levels("direct", operation, num_devices, 1, root)
    # Each device gets the whole tensors of all others.
    exchange = _exchange([range(num_devices)], lambda device: [0])
    whole = [send._replace(adds=True) for send in exchange]
    return _plan("direct", operation, num_devices, 1, [whole])


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
    _check_is_all_reduce("two_shot", operation, num_devices)
    return _levels("two_shot", operation, num_devices, 1)


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
    _check_is_all_reduce("parameter_server", operation, num_devices)
    sums = _sums_to([range(num_devices)], [0])
    rounds = [sums, _backwards(sums, adds=False)]
    return _plan("parameter_server", operation, num_devices, 1, rounds)


def hierarchical(
    operation: str,
    num_devices: int,
    *,
    devices_per_machine: int,
    root: int | None = None,
) -> CollectivePlan:
    """Inside of each machine, then between machines, then inside again.

    Between m machines of g devices, each device sends 2 (m - 1) / m of S / g
    to other machines, where `two_shot` sends 2 (m - 1) / m of S.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices; those of a machine follow each other.
        devices_per_machine: Number of devices of each machine.
        root: For a reduce; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be, or if
            machines do not have equally many devices.

    >>> plan = hierarchical("all_reduce", 8, devices_per_machine=4)
    >>> sends = [send for sends in plan.rounds for send in sends]
    >>> sum(s.source // 4 != s.target // 4 for s in sends), plan.num_chunks
    (16, 8)
    """
    root = checked_root(operation, num_devices, root)
    if devices_per_machine < 1 or num_devices % devices_per_machine:
        fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            "All machines must have equally many devices. Received: "
            f"num_devices={num_devices}, devices_per_machine="
            f"{devices_per_machine}. Take one of {fits} for the latter."
        )
    return _levels(
        "hierarchical", operation, num_devices, devices_per_machine, root
    )


def _levels(name, operation, num_devices, size, root=None):
    """Within groups of some size, and between them."""
    root = checked_root(operation, num_devices, root)
    machines = [range(m, m + size) for m in range(0, num_devices, size)]
    peers = [range(index, num_devices, size) for index in range(size)]
    if operation == "reduce":
        leaders = peers[root % size]
        rounds = [_sums_to(machines, leaders), _sums_to([leaders], [root])]
        return _plan(name, operation, num_devices, 1, rounds, root)
    gather = [
        _exchange(peers, lambda device: [device]),
        _exchange(machines, lambda device: peers[device % size]),
    ]
    # A sum of parts is an all-gather that goes backwards and adds.
    sums = [_backwards(sends, adds=True) for sends in reversed(gather)]
    rounds = {
        "all_gather": gather,
        "reduce_scatter": sums,
        "all_reduce": sums + gather,
    }[operation]
    return _plan(name, operation, num_devices, num_devices, rounds)


def _check_is_all_reduce(name, operation, num_devices):
    checked_root(operation, num_devices, None)
    if operation != "all_reduce":
        raise ValueError(
            f"`{name}` is an algorithm for 'all_reduce' only. Received: "
            f"{operation!r}. Take `direct`, of whose operations it is made."
        )


def _exchange(
    groups: Iterable[Sequence[int]], chunks_of: Callable[[int], Iterable[int]]
) -> list[Send]:
    """Within each group, each device sends its chunks to all others."""
    # Each to the next one first, so that none gets two chunks at once.
    return [
        Send(device, group[(index + distance) % len(group)], chunk)
        for group in groups
        for distance in range(1, len(group))
        for index, device in enumerate(group)
        for chunk in chunks_of(device)
    ]


def _sums_to(
    groups: Iterable[Sequence[int]], roots: Iterable[int]
) -> list[Send]:
    """Each device of a group sends all it has to the root of the group."""
    return [
        Send(device, root, 0, adds=True)
        for group, root in zip(groups, roots, strict=True)
        for device in group
        if device != root
    ]


def _backwards(sends: list[Send], adds: bool) -> list[Send]:
    """Each chunk goes back to where it came from."""
    return [Send(s.target, s.source, s.chunk, adds) for s in sends]


def _plan(name, operation, num_devices, num_chunks, rounds, root=None):
    rounds = [sends for sends in rounds if sends]
    return CollectivePlan(
        operation, num_devices, num_chunks, rounds, root, name
    )


ALGORITHMS = {
    "direct": direct,
    "two_shot": two_shot,
    "parameter_server": parameter_server,
}
