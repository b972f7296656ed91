"""Plans out of plans: on other devices, side by side, backwards.

To build them here, a plan is a list of rounds, each a list of sends. That of a
sum is that of a distribution run backwards: where a chunk went from device 0 to
device 1, device 1 now sends what it has added up to device 0, which adds it to
its own. So reduce is broadcast backwards, and reduce-scatter all-gather.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tfscale.collectives.planning.send import Send

Rounds = list[list[Send]]


def on(
    rounds: Rounds,
    devices: Sequence[int],
    chunks: Mapping[int, Iterable[int]] | None = None,
) -> Rounds:
    """A plan on other devices, or whose chunks are several each.

    Args:
        rounds: The plan.
        devices: Which device each of its devices becomes.
        chunks: Which chunks each of its chunks becomes; by default itself.

    >>> (sends,) = on([[Send(0, 1, 0)]], [4, 7], {0: (1, 2)})
    >>> [str(send) for send in sends]
    ['4>7:1', '4>7:2']
    """
    return [
        [
            Send(devices[send.source], devices[send.target], chunk, send.adds)
            for send in sends
            for chunk in (chunks[send.chunk] if chunks else (send.chunk,))
        ]
        for sends in rounds
    ]


def beside(plans: Iterable[Rounds]) -> Rounds:
    """Plans at the same time, on devices of their own each."""
    return [
        [send for sends in of_all for send in sends]
        for of_all in itertools.zip_longest(*plans, fillvalue=())
    ]


def backwards(rounds: Rounds, adds: bool) -> Rounds:
    """Every chunk goes back where it came from, and is added to what is there.

    Args:
        rounds: A plan that sends each chunk to each device once at most.
        adds: Whether it is added; else it is stored.
    """
    return [
        [Send(s.target, s.source, s.chunk, adds) for s in sends]
        for sends in reversed(rounds)
    ]


def without_needless(
    rounds: Rounds, beginning: Iterable[tuple[int, int]]
) -> Rounds:
    """Leaves out what brings a device a chunk that it has.

    Args:
        rounds: A plan in which nothing is added.
        beginning: Device and chunk of what there is at the beginning.
    """
    there, kept = set(beginning), []
    for sends in rounds:
        needed = []
        for send in sends:
            if (send.target, send.chunk) not in there:
                there.add((send.target, send.chunk))
                needed.append(send)
        if needed:
            kept.append(needed)
    return kept
