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
from tfscale.collectives.planning.contents import check_operation
from tfscale.collectives.planning.send import Send


def direct(operation: str, num_devices: int) -> CollectivePlan:
    """Each device sends to each that needs it, in one round.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices.

    Raises:
        ValueError: If the operation or the number of devices is invalid.

    >>> plan = direct("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (1, 1, (3, 3, 3, 3))
    """
    check_operation(operation, num_devices)
    if operation != "all_reduce":
        return _levels("direct", operation, num_devices, 1)
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
        ValueError: If the operation or the number of devices is invalid.

    >>> plan = two_shot("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (2, 4, (6, 6, 6, 6))
    """
    _check_is_all_reduce("two_shot", operation, num_devices)
    return _levels("two_shot", operation, num_devices, 1)


def parameter_server(operation: str, num_devices: int) -> CollectivePlan:
    """An `"all_reduce"` in which device 0 sums for all others."""
    _check_is_all_reduce("parameter_server", operation, num_devices)
    sums = _sums([range(num_devices)])
    rounds = [sums, _backwards(sums, adds=False)]
    return _plan("parameter_server", operation, num_devices, 1, rounds)


def hierarchical(
    operation: str,
    num_devices: int,
    *,
    devices_per_machine: int,
) -> CollectivePlan:
    """Inside of each machine, then between machines, then inside again.

    Between m machines of g devices, each device sends 2 (m - 1) / m of S / g
    to other machines, where `two_shot` sends 2 (m - 1) / m of S.

    Args:
        operation: See `CollectivePlan`.
        num_devices: Number of devices; those of a machine follow each other.
        devices_per_machine: Number of devices of each machine.

    Raises:
        ValueError: If the operation or a number is invalid, or machines do not
            have equally many devices.

    >>> plan = hierarchical("all_reduce", 8, devices_per_machine=4)
    >>> sends = [send for sends in plan.rounds for send in sends]
    >>> sum(s.source // 4 != s.target // 4 for s in sends), plan.num_chunks
    (16, 8)
    """
    check_operation(operation, num_devices)
    if devices_per_machine < 1 or num_devices % devices_per_machine:
        fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            "All machines must have the same number of devices. Received: "
            f"num_devices={num_devices}, "
            f"devices_per_machine={devices_per_machine}. Take one of {fits} "
            "for the latter."
        )
    return _levels("hierarchical", operation, num_devices, devices_per_machine)


def _levels(name, operation, num_devices, size):
    """Within groups of some size, and between them."""
    machines = [range(m, m + size) for m in range(0, num_devices, size)]
    peers = [range(index, num_devices, size) for index in range(size)]
    if operation == "reduce":
        rounds = [_sums(machines), _sums(peers[:1])]
        return _plan(name, operation, num_devices, 1, rounds)
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
    check_operation(operation, num_devices)
    if operation != "all_reduce":
        raise ValueError(
            f"`{name}` is an algorithm for 'all_reduce' only. Received: "
            f"{operation!r}. Use `direct`."
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


def _sums(groups: Iterable[Sequence[int]]) -> list[Send]:
    """Each device of a group sends its chunk to the group's first device."""
    return [
        Send(device, group[0], 0, adds=True)
        for group in groups
        for device in group[1:]
    ]


def _backwards(sends: list[Send], adds: bool) -> list[Send]:
    """Each chunk goes back to where it came from."""
    return [Send(s.target, s.source, s.chunk, adds) for s in sends]


def _plan(name, operation, num_devices, num_chunks, rounds):
    rounds = [sends for sends in rounds if sends]
    return CollectivePlan(operation, num_devices, num_chunks, rounds, name)


ALGORITHMS = {
    "direct": direct,
    "two_shot": two_shot,
    "parameter_server": parameter_server,
}
