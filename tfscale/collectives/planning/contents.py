"""Contents of the chunks of each device as a plan is played through.

A content is the set of the devices whose values are in it, and how they were
added up: two contents with one `number` are equal to the last bit.
"""

import dataclasses
import functools
from collections.abc import Sequence

from tfscale.collectives.planning.send import Send
from tfscale.integers import check_integer

# Operations: what devices begin with and what they have to end with. Chunk c
# is one of the equal parts of a tensor; where each device has a part of its
# own, chunk d is that of device d.
#
#                     begins with                    ends with
#   reduce            each: all chunks               device 0: their sums
#   all_reduce        each: all chunks               each: their sums
#   reduce_scatter    each: all chunks               device d: sum of chunk d
#   all_gather        device d: chunk d              each: all chunks
OPERATIONS = ("reduce", "all_reduce", "reduce_scatter", "all_gather")
SUMS = ("reduce", "all_reduce", "reduce_scatter")
# Chunk d belongs to device d, so there is one for each device.
SHARDED = ("reduce_scatter", "all_gather")


@dataclasses.dataclass(frozen=True)
class Content:
    """The devices whose values are added up in a chunk, and by which sum."""

    devices: frozenset[int]
    number: int


class Contents:
    """Of all devices, after some of the rounds of a plan."""

    def __init__(self, plan):
        self._plan = plan
        self._numbers = {}
        self._of = {
            (device, chunk): self._content(frozenset([device]), device)
            for device in range(plan.num_devices)
            for chunk in range(plan.num_chunks)
            if plan.operation in SUMS or device == chunk
        }

    def get(self, device: int, chunk: int) -> Content | None:
        """The content of a device's chunk now; `None` for nothing."""
        return self._of.get((device, chunk))

    def play(self, sends: Sequence[Send]) -> None:
        """Plays a round: all send what they had before it."""
        found = {}
        for send in sends:
            found.setdefault((send.target, send.chunk), []).append(send)
        new = {}
        for (target, chunk), arriving in found.items():
            if not arriving[0].adds:
                new[target, chunk] = self._of[arriving[0].source, chunk]
                continue
            operands = {target: self._of[target, chunk]} | {
                send.source: self._of[send.source, chunk] for send in arriving
            }
            # Added up in the order of devices, the target's own among them.
            new[target, chunk] = functools.reduce(
                self._sum, [content for _, content in sorted(operands.items())]
            )
        self._of |= new

    def wanted(self) -> dict[tuple[int, int], frozenset[int]]:
        """By device and chunk, whose values have to be in it at the end."""
        plan, devices = self._plan, range(self._plan.num_devices)
        everybody = frozenset(devices)
        if plan.operation == "reduce_scatter":
            return {(device, device): everybody for device in devices}
        ends = [0] if plan.operation == "reduce" else devices
        adds = plan.operation in SUMS
        return {
            (end, chunk): everybody if adds else frozenset([chunk])
            for end in ends
            for chunk in range(plan.num_chunks)
        }

    def _sum(self, one, other):
        # a + b is b + a to the last bit.
        numbers = tuple(sorted((one.number, other.number)))
        return self._content(one.devices | other.devices, numbers)

    def _content(self, devices, made_of):
        number = self._numbers.setdefault(made_of, -1 - len(self._numbers))
        return Content(devices, number)


def check_operation(operation: str, num_devices: int) -> None:
    """Refuses an unknown operation, or less than one device."""
    if operation not in OPERATIONS:
        raise ValueError(
            f"`operation` must be one of {', '.join(OPERATIONS)}. Received: "
            f"{operation!r}."
        )
    check_integer("num_devices", num_devices)
