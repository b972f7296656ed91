"""Schedules whose stages go round the devices several times.

Device `d` of `D` has the stages `d`, `d + D`, `d + 2 D`, ...
"""

from tfscale.schedules.action import Action
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.schedule import check_sizes


def interleaved(
    num_devices: int, num_microbatches: int, stages_per_device: int = 2
) -> Schedule:
    """1F1B over smaller stages (Narayanan et al. 2021, section 2.2.2).

    Divides the bubble of 1F1B by `stages_per_device`, at the price of as many
    times the transfers and more activations. Two devices, small letters for
    the second stage of each::

        device 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1    b2    b3 B2 B3
        device 1     F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    `M` microbatches go round `D` devices in `M // D` groups; a `ValueError`
    says so if these are not equal.

    >>> [str(action) for action in interleaved(2, 2, 2).actions[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    rows = looped_1f1b(num_devices, num_microbatches, stages_per_device, hop=2)
    return Schedule(rows, name="interleaved")


def zb1p(
    num_devices: int, num_microbatches: int, stages_per_device: int = 2
) -> Schedule:
    """Interleaved 1F1B whose weight gradients wait (Qi et al. 2023).

    PyTorch's `ScheduleInterleavedZeroBubble`, for the sizes of `interleaved`.
    B computes the gradients of inputs only, so that the device before goes on
    sooner. Device `d` puts `d` weight gradients off, and fills the end of the
    step with them. Two devices, small letters for the second stage of each::

        device 0  F0 F1 f0 f1    b0 w0 b1 w1 B0 W0 B1 W1
        device 1     F0 F1 f0 b0 f1 b1 w0 B0 w1 B1 W0 W1

    >>> [str(action) for action in zb1p(2, 2, 1).actions[1]]
    ['F1.0', 'B1.0', 'F1.1', 'B1.1', 'W1.0', 'W1.1']
    """
    rows = []
    for device, actions in enumerate(
        looped_1f1b(num_devices, num_microbatches, stages_per_device, hop=1)
    ):
        row, late = [], []
        for action in actions:
            row.append(action)
            if action.kind == "B":
                late.append(action._replace(kind="W"))
                if len(late) > device:
                    row.append(late.pop(0))
        rows.append(row + late)
    return Schedule(rows, name="zb1p")


def zb_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients wait (Qi et al. 2023, section 3.1).

    As much memory as 1F1B and a third of its bubble, if F, B and W take equal
    time::

        device 0  F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
        device 1     F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        device 2        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    >>> [str(action) for action in zb_h1(2, 2).actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'W0.0', 'B0.1', 'W0.1']
    """
    rows = zb1p(num_devices, num_microbatches, 1).actions
    return Schedule(rows, name="zb_h1")


def looped_bfs(
    num_devices: int, num_microbatches: int, stages_per_device: int = 2
) -> Schedule:
    """All microbatches through a stage, then the next (Lamy-Poirier 2022).

    Breadth-first: bubble and number of transfers of `interleaved`, the
    activations of GPipe, and a stage's gradients are complete sooner. Two
    devices, small letters for the second stage of each::

        device 0  F0 F1 F2 f0 f1 f2       b0 b1 b2 B0 B1 B2
        device 1     F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2

    >>> [str(action) for action in looped_bfs(2, 2).actions[0]]
    ['F0.0', 'F0.1', 'F2.0', 'F2.1', 'B2.0', 'B2.1', 'B0.0', 'B0.1']
    """
    check_sizes(num_devices * stages_per_device, num_microbatches)
    rows = []
    for device in range(num_devices):
        stages = range(device, num_devices * stages_per_device, num_devices)
        rows.append(
            [
                Action(kind, stage, microbatch)
                for kind, order in (("F", stages), ("B", reversed(stages)))
                for stage in order
                for microbatch in range(num_microbatches)
            ]
        )
    return Schedule(rows, name="looped_bfs")


def looped_1f1b(
    num_devices: int, num_microbatches: int, stages_per_device: int, hop: int
) -> list[list[Action]]:
    """The actions of each device: forwards ahead, then F and B in turn.

    A group of microbatches goes through all stages of a device before the
    next. Each later device adds `hop` forwards ahead: 2 where a B takes the
    time of two F, 1 where it takes that of one.
    """
    check_sizes(num_devices * stages_per_device, num_microbatches)
    group = num_microbatches
    if stages_per_device > 1:
        group = _group_size(num_devices, num_microbatches)
    rows = []
    for device in range(num_devices):
        stages = range(device, num_devices * stages_per_device, num_devices)
        forwards, backwards = (
            [
                Action(kind, stage, microbatch)
                for first in range(0, num_microbatches, group)
                for stage in order
                for microbatch in range(first, first + group)
            ]
            for kind, order in (("F", stages), ("B", stages[::-1]))
        )
        ahead = (len(stages) - 1) * group + hop * (num_devices - 1 - device)
        rows.append(row := forwards[:ahead])
        for index, backward in enumerate(backwards, ahead):
            row += [*forwards[index : index + 1], backward]
    return rows


def _group_size(num_devices, num_microbatches):
    def num_groups(count):
        return max(1, count // num_devices)

    groups = num_groups(num_microbatches)
    if num_microbatches % groups:
        less, more = num_microbatches - 1, num_microbatches + 1
        while less % num_groups(less):
            less -= 1
        while more % num_groups(more):
            more += 1
        raise ValueError(
            "An interleaved schedule must divide M microbatches on D devices "
            "into M // D equal groups. Received: "
            f"num_microbatches={num_microbatches} on {num_devices} devices "
            f"({groups} groups). Use num_microbatches={less} or {more}."
        )
    return num_microbatches // groups
