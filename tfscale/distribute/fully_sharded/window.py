"""Which gathered weights are alive at the same time: a window in bytes.

A step uses gathered weights in an order, forward and then backward. Each gather
joins a window that holds a number of bytes; the oldest leave it to make room.
A gather must not run before what leaves has been used, so the window bounds the
bytes that are alive:

    gathers in their order     a   b   c   d   c   b   a
    window of two              a   ab  bc  cd  cd  bc  ab
    left before                        a   b   .   d   c

The second `c` finds its weight still there: it is kept and not gathered again,
as FSDP2 does with the last layers (`reshard_after_forward=False`).

Source: the two all-gather buffers of Zhao et al., PyTorch FSDP: Experiences on
Scaling Fully Sharded Data Parallel (2023), section 3.3.2.
"""

from typing import Any


class Window:
    """The gathers whose weights are alive.

    Args:
        limit: Bytes that it holds. A weight that is larger is alone in it.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._alive: dict[Any, int] = {}

    def __contains__(self, gather: Any) -> bool:
        return gather in self._alive

    def add(self, gather: Any, num_bytes: int) -> list[Any]:
        """Lets a gather join, or makes it the newest if it is there.

        Args:
            gather: Names the gather.
            num_bytes: Size of the whole weight.

        Returns:
            The gathers that leave, oldest first: the new one has to wait until
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
