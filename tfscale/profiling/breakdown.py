"""Shares of the time of profiled steps, for each device.

    device 0   compute ████████        ███████
               sends          ▒▒▒▒
               input                ──        of the idle time
                          ↑ both: computes and sends

The terms are those of Holistic Trace Analysis (HTA, of PyTorch): compute,
communication and idle times, and the overlap, which is the time of both over
that of communication.
"""

import collections
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in any of the intervals.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times in both of two sets.

    >>> intersection([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times of `a` that are not in `b`.

    >>> difference([(0, 3), (4, 6)], [(2, 5)])
    [(0, 2), (5, 6)]
    """
    edge = float("inf")
    ends = [-edge, *(time for interval in b for time in interval), edge]
    return intersection(a, list(zip(ends[::2], ends[1::2])))


def length(intervals: Iterable[Interval]) -> float:
    """The duration of a set.

    >>> length([(0, 3), (4, 6)])
    5
    """
    return sum(end - begin for begin, end in intervals)


class Event(NamedTuple):
    """An operation of a device.

    Attributes:
        device: The name of the device.
        begin: Picoseconds.
        end: Picoseconds.
        name: The operation's, with its scopes.
        axis: The axis of the mesh that it communicates over, "host" for copies
            between host and device, None if it computes.
    """

    device: str
    begin: float
    end: float
    name: str
    axis: str | None = None


class Recording(NamedTuple):
    """The profiled steps.

    Attributes:
        events: Those of all devices.
        steps: When the steps ran.
        inputs: When they waited for a batch of the dataset.
        num_bytes: Bytes of the batches.
    """

    events: Sequence[Event]
    steps: Sequence[Interval]
    inputs: Sequence[Interval]
    num_bytes: int = 0


class Shares(NamedTuple):
    """Shares of the time of a device, 0 to 1.

    Attributes:
        compute: It computes.
        communication: It communicates, by axis of the mesh.
        both: It does both at once.
        idle: It does neither.
        input_wait: Of `idle`, while a step waits for its batch.
        bubble: Of `idle`, while other stages of the pipeline are at work.
    """

    compute: float
    communication: dict[str, float]
    communicating: float
    both: float
    idle: float
    input_wait: float
    bubble: float

    @property
    def overlap(self) -> float | None:
        """Time of both over time of communication; None without any."""
        return self.both / self.communicating if self.communicating else None


def shares(
    recording: Recording, pipelines: Sequence[Sequence[str]] = ()
) -> dict[str, Shares]:
    """The shares of each device that has an event.

    Args:
        recording: The steps.
        pipelines: The devices of each pipeline of several stages.

    >>> events = [Event("a", 0, 6, "mul"), Event("a", 4, 8, "send", "data")]
    >>> found = shares(Recording(events, [(0, 10)], [(9, 10)]))["a"]
    >>> found.compute, found.communication, found.both, found.idle
    (0.6, {'data': 0.4}, 0.2, 0.2)
    >>> found.input_wait, found.overlap
    (0.1, 0.5)
    """
    steps, inputs = union(recording.steps), union(recording.inputs)
    total = length(steps)
    of_device = collections.defaultdict(list)
    for event in recording.events:
        of_device[event.device].append(event)

    def times(events):
        return intersection(union((e.begin, e.end) for e in events), steps)

    def share(intervals):
        return length(intervals) / total

    found = {}
    for device, events in sorted(of_device.items()):
        compute = times(e for e in events if e.axis is None)
        sends = times(e for e in events if e.axis is not None)
        idle = difference(steps, union([*compute, *sends]))
        waits = intersection(idle, inputs)
        running = _running(recording, steps, device, pipelines)
        axes = sorted({e.axis for e in events if e.axis is not None})
        found[device] = Shares(
            compute=share(compute),
            communication={
                axis: share(times(e for e in events if e.axis == axis))
                for axis in axes
            },
            communicating=share(sends),
            both=share(intersection(compute, sends)),
            idle=share(idle),
            input_wait=share(waits),
            bubble=share(intersection(difference(idle, waits), running)),
        )
    return found


def _running(recording, steps, device, pipelines):
    """When the pipeline of a device runs: from its first to its last action."""
    devices = next((each for each in pipelines if device in each), ())
    found = []
    for begin, end in steps:
        times = [
            (e.begin, e.end)
            for e in recording.events
            if e.device in devices
            and begin <= e.begin <= end
            and "/stage_" in f"/{e.name}"
        ]
        if times:
            begins, ends = zip(*times)
            found.append((min(begins), max(ends)))
    return union(found)
