"""What an algorithm is made of, and plans of all operations made of it.

All take the number of devices and return rounds, from or to device 0; see
`building.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfscale.collectives.planning import building
from tfscale.collectives.planning.building import Rounds
from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import PARTED
from tfscale.collectives.planning.contents import SUMS
from tfscale.collectives.planning.contents import checked_root


class Pattern(NamedTuple):
    """What an algorithm is made of.

    Args:
        broadcast: From device 0, in `broadcast_chunks` chunks.
        broadcast_chunks: A function of the number of devices.
        gather: To device 0, of chunk d from device d.
        all_gather: Of chunk d from device d.
        reduce_scatter: If it is not all-gather backwards.
    """

    broadcast: Callable[[int], Rounds]
    broadcast_chunks: Callable[[int], int]
    gather: Callable[[int], Rounds]
    all_gather: Callable[[int], Rounds]
    reduce_scatter: Callable[[int], Rounds] | None = None

    def sums(self, count: int) -> Rounds:
        """Reduce-scatter: device d gets the sum of chunk d."""
        if self.reduce_scatter is not None:
            return self.reduce_scatter(count)
        return building.backwards(self.all_gather(count), adds=True)


def plan_of(
    name: str,
    pattern: Pattern,
    operation: str,
    num_devices: int,
    root: int | None,
    machine_size: int | None = None,
) -> CollectivePlan:
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
    return CollectivePlan(
        operation, num_devices, num_chunks, rounds, root, name
    )


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


def one(count: int) -> int:
    """The number of chunks of a broadcast that sends all at once."""
    del count
    return 1


def same(count: int) -> int:
    """The number of chunks of a broadcast that sends a part for each device."""
    return count


def distances(count: int) -> list[int]:
    """1, 2, 4, ... below a number."""
    return [1 << k for k in range((count - 1).bit_length())]


def rounds_of(rounds: Rounds) -> Rounds:
    """Those in which there is a send."""
    return [sends for sends in rounds if sends]
