"""Which gathered weights are alive at the same time: a window in bytes.

A step uses gathered weights in an order, forward and then backward. Each gather
joins a window that holds a number of bytes; the oldest leave it to make room.
A gather must not run before what leaves has been used, so the window bounds the
bytes that are alive:

    gathers in their order     a   b   c   d   c   b   a
    window of two              a   ab  bc  cd  dc  cb  ba
    left before                        a   b   .   d   c

The second `c` finds its weight still there: it is kept and not gathered again,
as FSDP2 does with the last layers (`reshard_after_forward=False`).

Source: the two all-gather buffers of Zhao et al., PyTorch FSDP: Experiences on
Scaling Fully Sharded Data Parallel (2023), section 3.3.2.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple


class Need(NamedTuple):
    """A weight, named by its gather, is needed by the forward or backward."""

    gather: Hashable
    num_bytes: int
    is_backward: bool


def plan(needs: Sequence[Need], limit: int) -> list[list[int] | None]:
    """Which needs, in the order of a step, gather a weight, and wait for what.

    For each need the indices of those, all earlier, whose uses must be over
    before the weight is gathered; None where the weight is there and is not
    gathered. A gather that waits for these uses, and for the gather before it,
    runs when no more than `limit` bytes are alive, its own included.

    Example: the drawing above.

    >>> needs = [Need(x, 1, False) for x in "abcd"]
    >>> needs += [Need(x, 1, True) for x in "cba"]
    >>> plan(needs, limit=2)
    [[], [], [0], [1], None, [3], [2, 4]]
    """
    window, alive_for, waits = Window(limit), {}, []
    for index, need in enumerate(needs):
        is_there = need.is_backward and need.gather in window
        left = window.add(need.gather, need.num_bytes)
        over = [i for gather in left for i in alive_for.pop(gather)]
        waits.append(None if is_there else over)
        alive_for.setdefault(need.gather, []).append(index)
    return waits


class Stay(NamedTuple):
    """A weight is in the window, from the need that gathers it.

    It leaves for the need `stop`, or at the end of the step.
    """

    gather: Hashable
    start: int
    stop: int


def stays(num_bytes: Mapping[Hashable, int], limit: int) -> list[Stay]:
    """When weights are gathered by a step that uses them in an order and back.

    `num_bytes` has the size of each by name, in the order of the forward.

    Example: `d` stays from its use in the forward to that in the backward.

    >>> stays(dict.fromkeys("abcd", 1), limit=2)[3:5]
    [Stay(gather='d', start=3, stop=6), Stay(gather='b', start=6, stop=8)]
    """
    order = [*num_bytes, *reversed(num_bytes)]
    window, starts, found = Window(limit), {}, []
    for index, name in enumerate(order):
        for left in window.add(name, num_bytes[name]):
            found.append(Stay(left, starts.pop(left), index))
        starts.setdefault(name, index)
    found += [Stay(name, start, len(order)) for name, start in starts.items()]
    return sorted(found, key=lambda stay: stay.start)


class Window:
    """The gathers whose weights are alive, of no more than `limit` bytes.

    A weight that is larger is alone in it.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._alive: dict[Any, int] = {}

    def __contains__(self, gather: Any) -> bool:
        return gather in self._alive

    def add(self, gather: Any, num_bytes: int) -> list[Any]:
        """Lets a gather join, or makes it the newest if it is there.

        Returns those that leave, oldest first: the new one has to wait until
        they have been used.
        """
        self._alive.pop(gather, None)
        left = []
        while self._alive and (
            sum(self._alive.values()) + num_bytes > self._limit
        ):
            oldest = next(iter(self._alive))
            del self._alive[oldest]
            left.append(oldest)
        self._alive[gather] = num_bytes
        return left
