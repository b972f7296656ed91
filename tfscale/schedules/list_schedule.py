"""Schedules found by list scheduling over the costs of the stages."""

from collections.abc import Sequence

from tfscale.schedules.action import KINDS
from tfscale.schedules.action import Action
from tfscale.schedules.action import dependencies
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.schedule import check_sizes


def list_schedule(
    stage_devices: Sequence[int],
    num_microbatches: int,
    in_flight: int,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
    name: str = "list",
) -> Schedule:
    """Every device does the action that can start first: B before F before W.

    The automatic schedule of Qi et al. (2023, section 4) for any placement of
    stages.

    A device holds `in_flight` microbatches at most, each stage of it counted by
    itself: at least its number of stages. Costs are those of each stage,
    `backward` of B and W together, `weight` the part of it that is W; by
    default F, B and W take the same.

    >>> schedule = list_schedule([0, 1], 2, 2)
    >>> [str(action) for action in schedule.actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'W0.0', 'B0.1', 'W0.1']
    """
    num_stages = len(stage_devices)
    check_sizes(num_stages, num_microbatches)
    num_devices = 1 + max(stage_devices)
    forward = forward or [1] * num_stages
    backward = backward or [2] * num_stages
    weight = weight or [1] * num_stages
    costs = {
        "F": forward,
        "B": [b - w for b, w in zip(backward, weight, strict=True)],
        "W": weight,
    }
    # A forward leaves room for one of each later stage of its device.
    room = [
        in_flight - stage_devices[stage + 1 :].count(device)
        for stage, device in enumerate(stage_devices)
    ]
    free_at, held = [0.0] * num_devices, [0] * num_devices
    rows = [[] for _ in range(num_devices)]
    ends = {}
    following = [
        Action(kind, stage, 0) for kind in KINDS for stage in range(num_stages)
    ]
    while following:
        candidates = []
        for action in following:
            device = stage_devices[action.stage]
            needed = dependencies(action, num_stages)
            if any(each not in ends for each in needed) or (
                action.kind == "F" and held[device] >= room[action.stage]
            ):
                continue
            start = max([free_at[device], *(ends[each] for each in needed)])
            rank = "BFW".index(action.kind)
            candidates.append((start, rank, -action.stage, action))
        start, *_, action = min(candidates)
        device = stage_devices[action.stage]
        rows[device].append(action)
        free_at[device] = start + costs[action.kind][action.stage]
        ends[action] = free_at[device]
        held[device] += {"F": 1, "B": 0, "W": -1}[action.kind]
        following.remove(action)
        if action.microbatch + 1 < num_microbatches:
            following.append(action._replace(microbatch=action.microbatch + 1))
    return Schedule(rows, name=name)


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """No bubble inside a step, for twice the memory (Qi et al. 2023, 3.2).

    A device of `D` runs up to `2 D - 1` forwards ahead. If F, B and W take
    equal time, every device works without a gap. The rest of the bubble is
    before devices start and after they end::

        device 0  F0 F1 F2 B0 W0 B1 F3 B2 W1 W2 B3 W3
        device 1     F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    >>> [str(action) for action in zb_h2(1, 2).actions[0]]
    ['F0.0', 'B0.0', 'W0.0', 'F0.1', 'B0.1', 'W0.1']
    """
    return list_schedule(
        range(num_devices), num_microbatches, 2 * num_devices - 1, name="zb_h2"
    )
