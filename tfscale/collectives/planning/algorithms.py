"""The algorithms that have a name: a function of the sizes for each.

With n devices, a tensor of S bytes, a latency a and a bandwidth B, an
all-reduce takes (where each device sends and gets S bytes in S / B, and
latencies of several sends overlap)

    direct               a              + (n - 1) S / B
    parameter_server     2 a            + 2 (n - 1) S / B
    two_shot             2 a            + 2 (n - 1) / n S / B
    ring                 2 (n - 1) a    + 2 (n - 1) / n S / B
    tree                 2 log2(n) a    + 2 log2(n) S / B
    halving_doubling     2 log2(n) a    + 2 (n - 1) / n S / B

the last two for powers of two. No algorithm sends less than 2 (n - 1) / n S
from each device, or needs fewer than log2(n) rounds of one partner each.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations (2009), for the ring; Thakur, Rabenseifner and Gropp,
Optimization of collective communication operations in MPICH (2005), for the
tree and halving and doubling; Li et al., Scaling distributed machine learning
with the parameter server (2014).
"""

from tfscale.collectives.planning import building
from tfscale.collectives.planning import patterns
from tfscale.collectives.planning.contents import PARTED
from tfscale.collectives.planning.contents import SUMS
from tfscale.collectives.planning.contents import checked_root
from tfscale.collectives.planning.plan import Plan


def direct(
    operation: str, num_devices: int, *, root: int | None = None
) -> Plan:
    """Everybody sends to everybody who needs it, in one round.

    Args:
        operation: See `Plan`.
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
            for sends in patterns.DIRECT.all_gather(num_devices)
        ]
        return Plan(operation, num_devices, 1, rounds, name="direct")
    return _plan("direct", patterns.DIRECT, operation, num_devices, root)


def two_shot(operation: str, num_devices: int) -> Plan:
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
    return _plan("two_shot", patterns.DIRECT, operation, num_devices, None)


def parameter_server(operation: str, num_devices: int) -> Plan:
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
    broadcast = patterns.DIRECT.broadcast(num_devices)
    rounds = building.backwards(broadcast, adds=True) + broadcast
    return Plan(operation, num_devices, 1, rounds, name="parameter_server")


def ring(operation: str, num_devices: int, *, root: int | None = None) -> Plan:
    """Each device gets from the one before and sends to the one after.

    Its all-reduce, a reduce-scatter and an all-gather, sends as little as any
    and all links are busy all the time, in 2 (n - 1) rounds::

        device 0  0>1+3  0>1+2  0>1+1  0>1:0  0>1:3  0>1:2
        device 1  1>2+0  1>2+3  1>2+2  1>2:1  1>2:0  1>2:3
        ...

    A broadcast goes along it as a chain, chunk after chunk.

    Args:
        operation: See `Plan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = ring("all_reduce", 4)
    >>> plan.num_rounds, plan.num_chunks, plan.chunks_sent
    (6, 4, (6, 6, 6, 6))
    """
    return _plan("ring", patterns.RING, operation, num_devices, root)


def tree(operation: str, num_devices: int, *, root: int | None = None) -> Plan:
    """A binomial tree: in each round twice as many devices have it.

    An all-reduce is a reduce and a broadcast, an all-gather a gather and a
    broadcast.

    Args:
        operation: See `Plan`.
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
        broadcast = patterns.TREE.broadcast(num_devices)
        rounds = building.backwards(broadcast, adds=True) + broadcast
        return Plan(operation, num_devices, 1, rounds, name="tree")
    return _plan("tree", patterns.TREE, operation, num_devices, root)


def halving_doubling(
    operation: str, num_devices: int, *, root: int | None = None
) -> Plan:
    """Partners exchange ever less, then ever more (Rabenseifner's).

    A reduce-scatter halves what is exchanged from round to round, an
    all-gather doubles it; an all-reduce is both, a broadcast a scatter and an
    all-gather, a reduce the same backwards. Devices above the largest power of
    two have a partner to exchange for them.

    Args:
        operation: See `Plan`.
        num_devices: Number of devices.
        root: For a broadcast, reduce or gather; by default device 0.

    Raises:
        ValueError: For an operation, a number or a root that cannot be.

    >>> plan = halving_doubling("all_reduce", 8)
    >>> plan.num_rounds, plan.num_chunks, set(plan.chunks_sent)
    (6, 8, {14})
    """
    name, pattern = "halving_doubling", patterns.HALVING_DOUBLING
    if operation == "all_reduce":
        checked_root(operation, num_devices, root)
        return Plan(
            operation,
            num_devices,
            patterns.largest_power(num_devices),
            patterns.halving_doubling_all_reduce(num_devices),
            name=name,
        )
    return _plan(name, pattern, operation, num_devices, root)


def hierarchical(
    operation: str,
    num_devices: int,
    *,
    devices_per_machine: int,
    root: int | None = None,
) -> Plan:
    """Inside of each machine, then between machines, then inside again.

    What has a root goes over trees, the others over rings, of the devices of a
    machine and of those with one index in all machines. Between m machines of
    g devices, each device sends 2 (m - 1) / m of S / g to other machines.

    Args:
        operation: See `Plan`.
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
    return _plan(
        "hierarchical",
        pattern,
        operation,
        num_devices,
        root,
        devices_per_machine,
    )


ALGORITHMS = {
    "direct": direct,
    "two_shot": two_shot,
    "parameter_server": parameter_server,
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
}

# Those of them whose only operation is all-reduce.
ALL_REDUCE_ONLY = ("two_shot", "parameter_server")


def _two_levels(size):
    """The pattern of machines with so many devices each."""

    def machines(count):
        return [range(m, m + size) for m in range(0, count, size)]

    def alike(count):
        return [range(index, count, size) for index in range(size)]

    def broadcast(count):
        leaders = alike(count)[0]
        between = building.on(patterns.TREE.broadcast(len(leaders)), leaders)
        inside = patterns.TREE.broadcast(size)
        return between + building.beside(
            building.on(inside, devices) for devices in machines(count)
        )

    def gather(count):
        leaders = alike(count)[0]
        inside = patterns.TREE.gather(size)
        between = building.on(
            patterns.TREE.gather(len(leaders)),
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
                patterns.RING.all_gather(len(of)),
                of,
                {i: [d] for i, d in enumerate(of)},
            )
            for of in alike(count)
        )
        inside = building.beside(
            building.on(
                patterns.RING.all_gather(size),
                devices,
                dict(enumerate(alike(count))),
            )
            for devices in machines(count)
        )
        return between + inside

    return patterns.Pattern(broadcast, lambda count: 1, gather, all_gather)


def _plan(name, pattern, operation, num_devices, root, machine_size=None):
    """Any operation, of an algorithm's broadcast, gather and all-gather."""
    root = checked_root(operation, num_devices, root)
    num_chunks = num_devices
    if operation in ("broadcast", "reduce"):
        num_chunks = pattern.broadcast_chunks(num_devices)
        rounds = pattern.broadcast(num_devices)
        if operation == "reduce":
            rounds = building.backwards(rounds, adds=True)
    elif operation == "gather":
        rounds = pattern.gather(num_devices)
    else:
        rounds = []
        if operation in SUMS:
            rounds += pattern.sums(num_devices)
        if operation != "reduce_scatter":
            rounds += pattern.all_gather(num_devices)
    if root:
        devices = _moved(num_devices, root, machine_size or num_devices)
        chunks = {d: [of] for d, of in enumerate(devices)}
        rounds = building.on(
            rounds, devices, chunks if operation in PARTED else None
        )
    return Plan(operation, num_devices, num_chunks, rounds, root, name)


def _moved(num_devices, root, machine_size):
    """Where devices are if device 0 is the root; machines stay together."""
    machine, index = divmod(root, machine_size)
    return [
        (device // machine_size + machine)
        % (num_devices // machine_size)
        * machine_size
        + (device + index) % machine_size
        for device in range(num_devices)
    ]


def _check_is_all_reduce(name, operation):
    if operation != "all_reduce":
        raise ValueError(
            f"`{name}` is an algorithm for 'all_reduce' only. Received: "
            f"{operation!r}. Take `direct`, of whose operations it is made."
        )
