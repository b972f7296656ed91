"""Broadcast, gather and all-gather of each algorithm, from or to device 0.

Everything else is made of these, see `building.py` and `algorithms.py`. All
take the number of devices and return rounds.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfscale.collectives.planning import building
from tfscale.collectives.planning.building import Rounds
from tfscale.collectives.planning.send import Send


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


def _one(count: int) -> int:
    del count
    return 1


def _same(count: int) -> int:
    return count


def _direct_broadcast(count):
    return _rounds([[Send(0, device, 0) for device in range(1, count)]])


def _direct_gather(count):
    return _rounds([[Send(device, 0, device) for device in range(1, count)]])


def _direct_all_gather(count):
    # Each to the next one first, so that nobody gets two chunks at once.
    sends = [
        Send(device, (device + distance) % count, device)
        for distance in range(1, count)
        for device in range(count)
    ]
    return _rounds([sends])


def _chain_broadcast(count):
    # Device d passes chunk c on in round d + c.
    rounds = [[] for _ in range(2 * count - 2)]
    for device in range(count - 1):
        for chunk in range(count):
            rounds[device + chunk].append(Send(device, device + 1, chunk))
    return _rounds(rounds)


def _ring_gather(count):
    # In round r device d passes on the chunk that began r devices behind it.
    return _rounds(
        [
            [Send(d, d - 1, d + r) for d in range(1, count - r)]
            for r in range(count - 1)
        ]
    )


def _ring_all_gather(count):
    return _rounds(
        [
            [Send(d, (d + 1) % count, (d - r) % count) for d in range(count)]
            for r in range(count - 1)
        ]
    )


def _ring_reduce_scatter(count):
    # All-gather backwards would go round the other way.
    return _rounds(
        [
            [
                Send(d, (d + 1) % count, (d - r - 1) % count, True)
                for d in range(count)
            ]
            for r in range(count - 1)
        ]
    )


def _tree_broadcast(count):
    # With 8 devices: 0>4; 0>2 4>6; 0>1 2>3 4>5 6>7.
    return _rounds(
        [
            [
                Send(device, device + distance, 0)
                for device in range(0, count - distance, 2 * distance)
            ]
            for distance in reversed(_distances(count))
        ]
    )


def _tree_gather(count):
    # With 8 devices: 1>0 3>2 5>4 7>6; 2>0 6>4; 4>0, with all that they have.
    return _rounds(
        [
            [
                Send(device + distance, device, chunk)
                for device in range(0, count - distance, 2 * distance)
                for chunk in range(
                    device + distance, min(device + 2 * distance, count)
                )
            ]
            for distance in _distances(count)
        ]
    )


def _tree_all_gather(count):
    gather = _tree_gather(count)
    broadcast = building.on(
        _tree_broadcast(count), range(count), {0: range(count)}
    )
    # Who has passed a chunk on to the root does not get it again.
    there = [(device, device) for device in range(count)]
    return building.without_needless(gather + broadcast, there)


def _doubling_all_gather(count):
    """In each round partners exchange all that they have.

    They are twice as far from each other as in the round before. Devices above
    the largest power of two leave their chunk to a partner, and get the rest
    from it at the end.
    """
    power = largest_power(count)
    chunks = {d: [c for c in (d, power + d) if c < count] for d in range(power)}
    before = [[Send(e, e - power, e) for e in range(power, count)]]
    core = [
        [
            Send(device, device ^ distance, chunk)
            for device in range(power)
            for chunk in range(power)
            if chunk // distance == device // distance
        ]
        for distance in _distances(power)
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
    return _rounds(before + core + after)


def _scattered_broadcast(count):
    # Van de Geijn: scatter, then all-gather.
    scatter = building.backwards(_tree_gather(count), adds=False)
    there = [(0, chunk) for chunk in range(count)]
    return building.without_needless(
        scatter + _doubling_all_gather(count), there
    )


def halving_doubling_all_reduce(count: int) -> Rounds:
    """Rabenseifner's, in as many chunks as the largest power of two.

    Devices above it give all that they have to a partner first, and get the
    sums from it last.
    """
    power = largest_power(count)
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
    return _rounds(moved(True) + core + moved(False))


def largest_power(count: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (count.bit_length() - 1)


def _distances(count):
    """1, 2, 4, ... below a number."""
    return [1 << k for k in range((count - 1).bit_length())]


def _rounds(rounds):
    return [sends for sends in rounds if sends]


DIRECT = Pattern(_direct_broadcast, _one, _direct_gather, _direct_all_gather)
RING = Pattern(
    _chain_broadcast,
    _same,
    _ring_gather,
    _ring_all_gather,
    _ring_reduce_scatter,
)
TREE = Pattern(_tree_broadcast, _one, _tree_gather, _tree_all_gather)
HALVING_DOUBLING = Pattern(
    _scattered_broadcast, _same, _tree_gather, _doubling_all_gather
)
