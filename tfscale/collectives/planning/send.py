"""One chunk on its way from one device to another: what plans are made of."""

import re
from typing import NamedTuple


class Send(NamedTuple):
    """A device sends a chunk, which another one stores or adds.

    Prints as `0>1:2` (device 0 sends chunk 2 to device 1, which stores it in
    the place of what it has) or `0>1+2` (which adds it to what it has).

    Args:
        source: Index of the device that sends, from 0.
        target: Index of the device that gets it.
        chunk: Index of the chunk, from 0.
        adds: Whether the target adds it to its own; else it stores it.

    Example:

    >>> str(Send(0, 1, chunk=2, adds=True))
    '0>1+2'
    >>> Send.parse("3>0:1")
    Send(source=3, target=0, chunk=1, adds=False)
    """

    source: int
    target: int
    chunk: int
    adds: bool = False

    def __str__(self) -> str:
        sign = "+" if self.adds else ":"
        return f"{self.source}>{self.target}{sign}{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Send":
        """Reads what `str` prints; a `ValueError` says what it expected."""
        match = re.fullmatch(r"(\d+)>(\d+)([:+])(\d+)", text)
        if not match:
            raise ValueError(
                "A send must be a device, '>', a device, ':' or '+', and a "
                f"chunk. Received: {text!r}. Write '0>1:2' if device 1 stores "
                "chunk 2 of device 0, or '0>1+2' if it adds the chunk."
            )
        return cls(int(match[1]), int(match[2]), int(match[4]), match[3] == "+")
