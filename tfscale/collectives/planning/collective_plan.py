"""A collective is data: round by round, who sends which chunk to whom."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfscale.collectives.planning.contents import SHARDED
from tfscale.collectives.planning.contents import SUMS
from tfscale.collectives.planning.contents import Contents
from tfscale.collectives.planning.contents import check_operation
from tfscale.collectives.planning.send import Send
from tfscale.integers import check_integer


@dataclasses.dataclass(frozen=True)
class CollectivePlan:
    """Who sends what to whom, round by round, checked when it is made.

    All sends of a round carry what their source had before the round. Where
    several chunks are added in one round they are added up in the order of
    devices, the target's own in its place.

    Args:
        operation: `"reduce"` to device 0, `"all_reduce"`, `"reduce_scatter"`
            or `"all_gather"`.
        num_devices: Number of devices.
        num_chunks: Into how many equal parts the whole tensor is divided; for
            `"reduce_scatter"` and `"all_gather"` the number of devices, chunk d
            being that of device d.
        rounds: For each round its sends: `Send`s, or strings like `"0>1+2"`.
        name: What summaries and pictures call it.

    Raises:
        ValueError: If a device sends what it does not have yet, gets what it
            has already, counts something twice, loses something, or if not
            every device has in the end what the operation promises, equal to
            the last bit on all. The message names the send and its round
            (from 0).

    Example: two devices; each adds up a half and sends the sum back.

    >>> plan = CollectivePlan(
    ...     "all_reduce",
    ...     num_devices=2,
    ...     num_chunks=2,
    ...     rounds=[["0>1+1", "1>0+0"], ["0>1:0", "1>0:1"]],
    ... )
    >>> plan.num_rounds, plan.chunks_sent
    (2, (2, 2))
    """

    operation: str
    num_devices: int
    num_chunks: int
    rounds: Sequence[Sequence[Any]]
    name: str = "custom"

    def __post_init__(self):
        rounds = tuple(
            tuple(
                Send.parse(send) if isinstance(send, str) else Send(*send)
                for send in sends
            )
            for sends in self.rounds
        )
        object.__setattr__(self, "rounds", rounds)
        self.validate()

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @property
    def chunks_sent(self) -> tuple[int, ...]:
        """Per device, how many chunks it sends."""
        return self._count_chunks("source")

    @property
    def chunks_received(self) -> tuple[int, ...]:
        """Per device, how many chunks it gets."""
        return self._count_chunks("target")

    def _count_chunks(self, end):
        counts = collections.Counter(
            getattr(send, end) for sends in self.rounds for send in sends
        )
        return tuple(counts[device] for device in range(self.num_devices))

    def validate(self) -> None:
        """Raises the `ValueError` of the class if the plan is wrong."""
        self._check_sizes()
        contents = Contents(self)
        for number, sends in enumerate(self.rounds):
            self._check_round(number, sends, contents)
            contents.play(sends)
        self._check_end(contents)

    def _check_sizes(self) -> None:
        check_operation(self.operation, self.num_devices)
        check_integer("num_chunks", self.num_chunks)
        if self.operation in SHARDED and self.num_chunks != self.num_devices:
            raise ValueError(
                f"A plan for {self.operation} must have a chunk for each "
                f"device. Received: num_chunks={self.num_chunks} for "
                f"{self.num_devices} devices."
            )

    def _check_round(self, number, sends, contents) -> None:
        if not sends:
            raise ValueError(
                "Every round of a plan must have a send. Received: round "
                f"{number} of {self.num_rounds} is empty. Remove it."
            )
        ways, added = collections.Counter(), {}
        for send in sends:
            self._check_ends(number, send)
            had = contents.get(send.source, send.chunk)
            if had is None:
                raise ValueError(self._explain_deadlock(number, send, contents))
            there = contents.get(send.target, send.chunk)
            if there is not None:
                self._check_arrival(number, send, had, there, added)
            ways[send.target, send.chunk, send.adds] += 1
        for (target, chunk, adds), count in ways.items():
            if not adds and (count > 1 or ways[target, chunk, True]):
                raise ValueError(
                    "In one round a device may either store a chunk once or "
                    "add to it. Received: in round "
                    f"{number} device {target} gets chunk {chunk} in "
                    f"{count + ways[target, chunk, True]} ways. Move all but "
                    "one to other rounds."
                )

    def _check_ends(self, number, send) -> None:
        devices = range(self.num_devices)
        if (
            send.source not in devices
            or send.target not in devices
            or send.source == send.target
            or send.chunk not in range(self.num_chunks)
        ):
            raise ValueError(
                "A send must carry a chunk of the plan from one of its "
                f"devices to another. Received: {send} in round {number}, of "
                f"{self.num_devices} devices and {self.num_chunks} chunks, "
                "counted from 0."
            )
        if send.adds and self.operation not in SUMS:
            raise ValueError(
                f"Nothing is added up in a {self.operation}. Received: {send} "
                f"in round {number}. Write "
                f"{send._replace(adds=False)} to store the chunk."
            )

    def _check_arrival(self, number, send, arriving, there, added) -> None:
        # `added` has the devices whose values the round has added so far.
        if send.adds:
            so_far = added.setdefault((send.target, send.chunk), set())
            for found, where in (
                (there.devices, " to a sum that has it"),
                (so_far, ", which another send of the round brings too"),
            ):
                twice = found & arriving.devices
                if twice:
                    raise ValueError(
                        "A plan must add every device's value once. Received: "
                        f"{send} in round {number} adds the value of device "
                        f"{min(twice)}{where}. Remove one of the two."
                    )
            so_far |= arriving.devices
        elif not there.devices <= arriving.devices:
            lost = min(there.devices - arriving.devices)
            raise ValueError(
                "A plan must not lose a value. Received: "
                f"{send} in round {number} overwrites a sum with the value of "
                f"device {lost}, which is not in what arrives. Write "
                f"{send._replace(adds=True)} to add it."
            )
        elif there.devices == arriving.devices:
            raise ValueError(
                "A plan must send no chunk to a device that has it. Received: "
                f"{send} in round {number}, where device {send.target} has "
                f"chunk {send.chunk} already. Remove it."
            )

    def _check_end(self, contents) -> None:
        numbers = {}
        for (device, chunk), wanted in contents.wanted().items():
            found = contents.get(device, chunk)
            missing = wanted - (found.devices if found else frozenset())
            if missing:
                raise ValueError(
                    f"At the end of a {self.operation} no value may be "
                    f"missing. Received: device {device} ends with chunk "
                    f"{chunk} without the value of device {min(missing)}. Add "
                    "a send of it."
                )
            if numbers.setdefault(chunk, found.number) != found.number:
                raise ValueError(
                    "All devices must end with sums that were added up in the "
                    "same order, or they differ in the last digits. Received: "
                    f"chunk {chunk} of device {device}, added up in another "
                    "order than on the first device. Let one device add it up "
                    "and send the sum to the others."
                )

    def _explain_deadlock(self, number, send, contents) -> str:
        """Follows what a send waits for until it ends, or comes back."""
        later = [
            (r, s)
            for r in range(number, self.num_rounds)
            for s in self.rounds[r]
        ]
        seen, story = [], []
        while send not in seen:
            seen.append(send)
            brings = [
                (r, s)
                for r, s in later
                if (s.target, s.chunk) == (send.source, send.chunk)
            ]
            if not brings:
                story.append(
                    f"{send} waits for chunk {send.chunk}, which nobody sends "
                    f"to device {send.source}"
                )
                break
            at, waited_for = brings[0]
            story.append(f"{send} waits for {waited_for} of round {at}")
            if contents.get(waited_for.source, waited_for.chunk):
                break
            send = waited_for
        return (
            "A device must have a chunk before the round in which it sends "
            f"it. Received a plan that would wait for ever: in round {number} "
            f"{'; '.join(story)}. Move the first of these sends to a later "
            "round, or the send that it waits for to an earlier one."
        )
