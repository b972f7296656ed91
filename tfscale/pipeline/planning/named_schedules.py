"""The schedules that have a name: a function of the sizes for each.

A new schedule is a new function that returns a `Schedule`, and nothing else.
"""

from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.planning.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, figure 2c).

    Three stages, four microbatches, backward as long as forward::

        device 0  F0 F1 F2 F3             B0 B1 B2 B3
        device 1     F0 F1 F2 F3       B0 B1 B2 B3
        device 2        F0 F1 F2 F3 B0 B1 B2 B3

    Every stage holds the activations of all microbatches at once. Backwards
    go from the first microbatch to the last, where the paper goes the other
    way: it costs nothing and gradients add up in the order of `one_f_one_b`,
    so both give the same numbers to the last bit.

    >>> [str(action) for action in gpipe(2, 2).actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    _check_sizes(num_stages, num_microbatches)
    actions = [
        [
            Action(kind, stage, microbatch)
            for kind in "FB"
            for microbatch in range(num_microbatches)
        ]
        for stage in range(num_stages)
    ]
    return Schedule(actions, name="gpipe")


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
    _check_sizes(num_stages, num_microbatches)
    actions = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        device_actions = [Action("F", stage, m) for m in range(ahead)]
        for microbatch in range(num_microbatches):
            device_actions.append(Action("B", stage, microbatch))
            if microbatch + ahead < num_microbatches:
                device_actions.append(Action("F", stage, microbatch + ahead))
        actions.append(device_actions)
    return Schedule(actions, name="1f1b")


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def get_schedule(
    schedule: str | Schedule, num_devices: int, num_microbatches: int
) -> Schedule:
    """The schedule of that name for these sizes, or a given one, checked.

    Args:
        schedule: `"gpipe"`, `"1f1b"` or a `Schedule`.
        num_devices: Size of the pipeline axis of the mesh. A named schedule
            has one stage per device; a `Schedule` may have more stages than
            devices.
        num_microbatches: Number of microbatches of one step.

    Raises:
        ValueError: For an unknown name or a `Schedule` for other sizes.

    >>> get_schedule("1f1b", 4, 8) == one_f_one_b(4, 8)
    True
    """
    if isinstance(schedule, Schedule):
        sizes = (schedule.num_devices, schedule.num_microbatches)
        if sizes != (num_devices, num_microbatches):
            raise ValueError(
                "A schedule must be made for the sizes that it is used with. "
                f"Received: schedule {schedule.name!r} for {sizes[0]} devices "
                f"and {sizes[1]} microbatches, to be used with {num_devices} "
                f"devices and num_microbatches={num_microbatches}. Make it "
                "for these sizes, or change the mesh or num_microbatches."
            )
        return schedule
    if schedule not in tuple(SCHEDULES):
        raise ValueError(
            "`schedule` must be a `tfscale.pipeline.Schedule` or one of "
            f"{', '.join(map(repr, SCHEDULES))}. Received: "
            f"schedule={schedule!r}."
        )
    return SCHEDULES[schedule](num_devices, num_microbatches)


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            "A schedule needs at least one stage and one microbatch. "
            f"Received: num_stages={num_stages}, "
            f"num_microbatches={num_microbatches}."
        )
