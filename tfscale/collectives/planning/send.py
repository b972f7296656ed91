"""One chunk on its way from one device to another: what plans are made of."""

import re
from typing import NamedTuple


class Send(NamedTuple):
    """A device sends a chunk, which another one stores or adds.

    `0>1:2` is device 0 that sends chunk 2 to device 1, which stores it, and
    `0>1+2` the same if device 1 adds it to its own.

    >>> str(Send.parse("0>1+2")), Send.parse("3>0:1").adds
    ('0>1+2', False)
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
