"""Events of devices, out of the planes that TensorFlow's profiler writes.

On CPUs, threads of the host run operations of all devices:

    python    [ step                                          ]
                [FunctionRun a] [FunctionRun b]
    thread 1        [ExecutorState::Process a [op][op]]
    thread 2                [ExecutorState::Process b [op]]
    tf_data       [IteratorGetNextOp::DoCompute]

`a` and `b` are parts of the step's function, one for each device, and the keys
of their sends say which. Other functions, those of `tf.data` for example, do
not begin in a step. GPUs have planes with streams of kernels and copies.
"""

import collections
import re
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

from tfscale.profiling.breakdown import Event
from tfscale.profiling.breakdown import Recording

STEP = "tfscale_step"
_DEVICE = re.compile(r"(?:task:(\d+)/)?(?:device:)?(CPU|GPU|TPU):(\d+)")
_INPUT = re.compile(r"Iterator\w*GetNext\w*::DoCompute")
_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_PEERS = re.compile(r"nccl|MemcpyP2P|MEMCPYP2P", re.IGNORECASE)
_HOST = re.compile(r"Memcpy(H2D|HtoD|D2H|DtoH)", re.IGNORECASE)
_NO_WORK = ("NoOp", "_Recv", "_HostRecv", "Placeholder", "_Arg", "_Retval")
_UNSIGNED = (1 << 64) - 1

# Names of two devices, or of None if they are not known, to an axis.
AxisOf = Callable[[str | None, str | None], str]


class _Traced(NamedTuple):
    """An event of a plane."""

    name: str
    operation: str
    begin: int
    end: int
    stats: dict[str, Any]


def short_name(device: str) -> str:
    """A device's name for a table.

    >>> short_name("/job:worker/replica:0/task:1/device:CPU:0")
    'task:1/CPU:0'
    """
    found = _DEVICE.search(device)
    if found is None:
        return device
    task, kind, index = found.groups()
    return f"task:{int(task or 0)}/{kind}:{index}"


def read_space(
    space: Any, axis_of: AxisOf, device: str = "CPU:0", task: int = 0
) -> Recording:
    """Reads an `XSpace` of the profiler.

    Args:
        space: The `XSpace`.
        axis_of: The axis of the mesh that a pair of devices communicates over.
        device: Whose operations are those of a function that sends nothing.
        task: The index of this worker.
    """
    host = [
        list(_events(plane, line))
        for plane in space.planes
        if plane.name == "/host:CPU"
        for line in plane.lines
    ]
    # Not the events that TensorFlow has cut off at the ends.
    steps = [(e.begin, e.end) for es in host for e in es if e.name == STEP]
    inputs = [
        event
        for events in host
        for event in events
        if _INPUT.match(event.name)
        and any(b <= event.begin and event.end <= e for b, e in steps)
    ]
    return Recording(
        [
            *_host_events(host, axis_of, short_name(device)),
            *_gpu_events(space, axis_of, task),
        ],
        steps,
        [(event.begin, event.end) for event in inputs],
        sum(event.stats.get("element_size", 0) for event in inputs),
    )


def _events(plane, line) -> Iterator[_Traced]:
    names = plane.stat_metadata

    def value(stat):
        kind = stat.WhichOneof("value")
        found = getattr(stat, kind) if kind else None
        return names[found].name if kind == "ref_value" else found

    for event in line.events:
        metadata = plane.event_metadata[event.metadata_id]
        begin = line.timestamp_ns * 1000 + event.offset_ps
        # Identities begin with an underscore.
        stats = {
            names[stat.metadata_id].name.lstrip("_"): value(stat)
            for stat in (*metadata.stats, *event.stats)
        }
        yield _Traced(
            metadata.name,
            metadata.display_name,
            begin,
            begin + event.duration_ps,
            stats,
        )


def _host_events(host, axis_of, single):
    parents: dict[int, int] = {}  # of a run of a function; 0 is the step
    operations, compiled = [], []
    for events in host:
        inside: list[tuple[int, int]] = []  # (end, run)
        for event in sorted(events, key=lambda e: (e.begin, -e.end)):
            while inside and inside[-1][0] <= event.begin:
                inside.pop()
            run = inside[-1][1] if inside else None
            if event.name == STEP:
                inside.append((event.end, 0))
            elif event.name == "ExecutorState::Process":
                inside.append((event.end, _number(event.stats.get("c", -1))))
            elif event.name == "FunctionRun" and run is not None:
                parents[_number(event.stats.get("p", -1))] = run
            elif event.stats.get("hlo_op") == event.name:
                compiled.append(event)
            elif run != 0 and event.name.endswith(f":{event.operation}"):
                operations.append((run, event))
    operations = _of_steps(operations, parents)
    votes: dict = collections.defaultdict(collections.Counter)
    for root, event in operations:
        if event.operation == "_Send":
            votes[root][short_name(event.stats["key"].split(";")[0])] += 1
    if len({name for vote in votes.values() for name in vote}) <= 1:
        # XLA does not say which device: it has compiled the whole step of one.
        for event in compiled:
            yield Event(single, event.begin, event.end, event.name)
    for root, event in operations:
        device = votes[root].most_common(1)[0][0] if votes[root] else single
        if "CPU" not in device:  # It only is given its work here.
            continue
        name, _ = event.name.rsplit(":", 1)
        axis = _axis_of_operation(event, axis_of)
        if axis != device:
            yield Event(device, event.begin, event.end, name, axis)


def _of_steps(operations, parents):
    """Operations of steps, each with the part of a step that runs it.

    A thread may still be within `Process` when the profiler ends, which then
    does not write it. The operations in it are those of an earlier part.
    """
    found = [(_root(run, parents), event) for run, event in operations]
    root_of = {event.name: root for root, event in found if root}
    roots = [
        root or (root_of.get(event.name) if run is None else None)
        for (run, event), (root, _) in zip(operations, found)
    ]
    return [
        (root, event)
        for root, (_, event) in zip(roots, operations)
        if root and event.operation not in _NO_WORK
    ]


def _number(number):
    return number & _UNSIGNED


def _root(run, parents):
    """The part of the step that a run of a function belongs to, or None."""
    if run is None:
        return None
    while parents.get(run):
        run = parents[run]
    return run if run in parents else None


def _axis_of_operation(event, axis_of):
    """The axis, None for compute, the device for a send to itself."""
    if event.operation == "_Send":
        source, _, target, *_ = event.stats["key"].split(";")
        source, target = short_name(source), short_name(target)
        return source if source == target else axis_of(source, target)
    if event.operation.startswith(("Collective", "Nccl")):
        return axis_of(None, None)
    return None


def _gpu_events(space, axis_of, task):
    for plane in space.planes:
        found = _GPU_PLANE.match(plane.name)
        if found is None:
            continue
        device = f"task:{task}/GPU:{found[1]}"
        # Other lines repeat the streams by step, scope and module.
        lines = [line for line in plane.lines if "Stream" in line.name]
        for event in (e for line in lines for e in _events(plane, line)):
            name = str(event.stats.get("tf_op") or event.name)
            name = name.rsplit(":", 1)[0]
            axis = None
            if _PEERS.search(event.name):
                axis = axis_of(None, None)
            elif _HOST.search(event.name):
                axis = "host"
            yield Event(device, event.begin, event.end, name, axis)
