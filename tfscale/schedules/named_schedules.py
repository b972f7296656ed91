"""The schedules that have a name, and the choice of the fastest."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfscale.schedules import looped_schedules
from tfscale.schedules import v_schedules
from tfscale.schedules.action import Action
from tfscale.schedules.list_schedule import list_schedule
from tfscale.schedules.list_schedule import zb_h2
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import simulate


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, figure 2c).

    Three stages, four microbatches, backward as long as forward::

        device 0  F0 F1 F2 F3             B0 B1 B2 B3
        device 1     F0 F1 F2 F3       B0 B1 B2 B3
        device 2        F0 F1 F2 F3 B0 B1 B2 B3

    Every stage holds the activations of all microbatches at once. Backwards
    go from the first microbatch to the last, in the paper from the last to the
    first. This costs nothing, and gradients add up in the order of
    `one_f_one_b`, so both give the same numbers to the last bit.

    >>> [str(action) for action in gpipe(2, 2).actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    rows = looped_schedules.looped_bfs(num_stages, num_microbatches, 1).actions
    return Schedule(rows, name="gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Each backward as soon as it can be (Narayanan et al. 2021, figure 4).

    Also known as PipeDream-flush and, in short, 1F1B. Three stages, four
    microbatches, backward as long as forward::

        device 0  F0 F1 F2       B0 F3 B1    B2    B3
        device 1     F0 F1    B0 F2 B1 F3 B2    B3
        device 2        F0 B0 F1 B1 F2 B2 F3 B3

    Takes as long as GPipe, but stage `s` of `S` holds the activations of
    `min(S - s, num_microbatches)` microbatches at most.

    >>> [str(action) for action in one_f_one_b(2, 2).actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']
    """
    rows = looped_schedules.looped_1f1b(num_stages, num_microbatches, 1, hop=1)
    return Schedule(rows, name="1f1b")


def pipedream(
    num_stages: int,
    num_microbatches: int = 1,
    *,
    num_batches: int,
    vertical_sync: bool = False,
) -> Schedule:
    """1F1B over `num_batches` without a flush (Narayanan et al. 2019).

    Three stages, five batches, update not shown, backward as long as forward::

        device 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
        device 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
        device 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    Each stage updates its weights after the backward of each batch (U). The
    backward of a batch uses the weights of its forward (weight stashing,
    section 3.3): of batch `b`, stage `s` of `S` uses version
    `max(b - (S - 1 - s), 0)`, with `vertical_sync` all stages version
    `max(b - (S - 1), 0)`. With several microbatches a batch it is PipeDream-2BW
    (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"):
    one update a batch, and for `num_microbatches >= S - 1` two versions, the
    same ones on all stages.

    >>> [str(action) for action in pipedream(2, num_batches=2).actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'U0.0', 'B0.1', 'U0.1']
    """
    flushed = one_f_one_b(num_stages, num_microbatches * num_batches)
    rows = []
    for row in flushed.actions:
        rows.append(new := [])
        for action in row:
            new.append(action)
            batch, position = divmod(action.microbatch, num_microbatches)
            if action.kind == "B" and position == num_microbatches - 1:
                new.append(Action("U", action.stage, batch))
    is_synced = vertical_sync or num_microbatches > 1
    name = "pipedream_vertical_sync" if vertical_sync else "pipedream"
    return Schedule(rows, name=name, vertical_sync=is_synced)


# They update weights within a window of batches: not equal to one device.
ASYNCHRONOUS: dict[str, Callable[..., Schedule]] = {
    "pipedream": pipedream,
    "pipedream_vertical_sync": functools.partial(pipedream, vertical_sync=True),
}
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": looped_schedules.interleaved,
    "looped_bfs": looped_schedules.looped_bfs,
    "zb_h1": looped_schedules.zb_h1,
    "zb_h2": zb_h2,
    "zb1p": looped_schedules.zb1p,
    "zb_v": v_schedules.zb_v,
    "dualpipev": v_schedules.dualpipev,
}
# These take any number of stages on each device from 2; those in the shape of a
# V have 2, and all others 1.
_LOOPED = ("interleaved", "looped_bfs", "zb1p")
_IN_V = ("zb_v", "dualpipev")


def get_schedule(
    schedule: str | Schedule,
    num_devices: int,
    num_microbatches: int,
    stages_per_device: int | None = None,
    num_batches: int = 1,
) -> Schedule:
    """The schedule of that name for these sizes, or a given one, checked.

    Args:
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"looped_bfs"`,
            `"zb_h1"`, `"zb_h2"`, `"zb1p"`, `"zb_v"`, `"dualpipev"`,
            `"pipedream"`, `"pipedream_vertical_sync"`, or a `Schedule`. For
            `"auto"`, which depends on the stages of a model, the schedule that
            its search begins with.
        num_devices: Size of the pipeline axis of the mesh.
        num_microbatches: Number of microbatches of one step.
        stages_per_device: Stages of each device, or None for the default of
            the schedule.
        num_batches: Batches until the flush, for the last two names.

    Raises:
        ValueError: For an unknown name, a `Schedule` for other sizes, or
            sizes that the schedule cannot have.

    >>> get_schedule("1f1b", 4, 8) == one_f_one_b(4, 8)
    True
    """
    if isinstance(schedule, Schedule):
        _check_given(schedule, num_devices, num_microbatches, stages_per_device)
        return schedule
    if schedule == "auto":
        if stages_per_device in (None, 1):
            return one_f_one_b(num_devices, num_microbatches)
        # The schedule nearest to 1F1B for several stages on a device.
        placement = tuple(range(num_devices)) * stages_per_device
        return list_schedule(placement, num_microbatches, len(placement))
    by_name = ASYNCHRONOUS | SCHEDULES
    if schedule not in tuple(by_name):
        raise ValueError(
            "`schedule` must be a `tfscale.schedules.Schedule`, 'auto' or one "
            f"of {', '.join(map(repr, by_name))}. Received: "
            f"schedule={schedule!r}."
        )
    fixed, options = 2 if schedule in _IN_V else 1, {}
    if schedule in ASYNCHRONOUS:
        options["num_batches"] = num_batches
    if schedule in _LOOPED:
        options["stages_per_device"] = stages_per_device or 2
        if stages_per_device == 1:
            raise ValueError(
                f"The schedule {schedule!r} needs two or more stages on each "
                "device. Received: stages_per_device=1. Use 'gpipe', '1f1b' "
                "or 'zb_h1'."
            )
    elif stages_per_device not in (None, fixed):
        raise ValueError(
            f"The schedule {schedule!r} has {fixed} "
            f"{'stages' if fixed > 1 else 'stage'} on each device. Received: "
            f"stages_per_device={stages_per_device}. Leave it out, or use "
            f"{', '.join(map(repr, _LOOPED))} or 'auto'."
        )
    return by_name[schedule](num_devices, num_microbatches, **options)


def of_window(schedule: Schedule, num_batches: int) -> Schedule:
    """An asynchronous schedule for another number of batches."""
    sizes = schedule.num_devices, schedule.microbatches_per_batch
    return get_schedule(schedule.name, *sizes, num_batches=num_batches)


def fastest(
    base: Schedule,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    fits: Callable[[Schedule], bool] | None = None,
) -> Schedule:
    """The fastest schedule of the sizes of `base` that fits the memory.

    Simulates all named schedules, and those that `list_schedule` finds for
    these costs (see there), with as many stages on each device. `fits` says
    whether the devices have the memory for a schedule. By default no device may
    hold more microbatches than the fullest of `base`.

    >>> base = get_schedule("auto", 4, 8)
    >>> costs = dict(forward=[1] * 4, backward=[2] * 4, weight=[1] * 4)
    >>> fastest(base, **costs).name
    'auto: zb_h1'
    """
    devices, microbatches = base.num_devices, base.num_microbatches
    per_device = base.num_stages // devices
    costs: Any = dict(forward=forward, backward=backward, weight=weight)
    found = [base]
    for name in SCHEDULES:
        with contextlib.suppress(ValueError):  # not for these sizes
            found.append(get_schedule(name, devices, microbatches, per_device))
    there = tuple(range(devices))
    for placement in {there * per_device, (there + there[::-1])}:
        if len(placement) == base.num_stages:
            found.append(
                list_schedule(placement, microbatches, base.num_stages, **costs)
            )

    def held(schedule):
        """The most microbatches, counted by stage, that a device holds."""
        return max(simulate(schedule, activation_bytes=1).peak_device_bytes)

    most = held(base)
    fits = fits or (lambda schedule: held(schedule) <= most)
    fitting = [schedule for schedule in found if fits(schedule)] or [base]
    best = min(fitting, key=lambda each: simulate(each, **costs).makespan)
    return Schedule(best.actions, name=f"auto: {best.name}")


def _check_given(schedule, num_devices, num_microbatches, stages_per_device):
    sizes = (schedule.num_devices, schedule.num_microbatches)
    if sizes != (num_devices, num_microbatches):
        raise ValueError(
            "A schedule must match the mesh and num_microbatches. Received: "
            f"schedule {schedule.name!r} for {sizes[0]} devices and {sizes[1]} "
            f"microbatches, with {num_devices} devices and "
            f"num_microbatches={num_microbatches}."
        )
    if schedule.has_updates:
        raise ValueError(
            "An asynchronous schedule depends on `steps_per_execution`, and so "
            f"has a name. Received: schedule {schedule.name!r} with "
            "U. Use schedule='pipedream', or leave out U."
        )
    if stages_per_device not in (None, schedule.num_stages / sizes[0]):
        raise ValueError(
            "`stages_per_device` must match the given "
            "`tfscale.schedules.Schedule`. Received: schedule "
            f"{schedule.name!r} with {schedule.num_stages} stages on "
            f"{sizes[0]} devices, and stages_per_device={stages_per_device}. "
            "Omit it."
        )
