"""Zero-bubble schedules whose stages go to the last device and back.

Device `d` of `D` has the stages `d` and `2 D - 1 - d`: the first device has
the first and the last stage, so a B follows its F at once.
"""

import collections

from tfscale.schedules.action import Action
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.schedule import check_sizes


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    No bubble but at the start if F, B and W take equal time. Each device holds
    as many activations as the first device of 1F1B. Two devices, small
    letters for the second stage of each::

        device 0  F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2
        device 1     F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2

    >>> [str(action) for action in zb_v(1, 1).actions[0]]
    ['F0.0', 'F1.0', 'B1.0', 'W1.0', 'B0.0', 'W0.0']
    """
    check_sizes(num_devices, num_microbatches)
    # The paper's order is for at least 2 D - 1 microbatches. If there are
    # fewer, those that are missing are left out.
    most = max(2 * num_devices - 1, num_microbatches)
    rows = []
    for device in range(num_devices):
        row = _Row(device, num_devices)
        row.add("F", times=2 * (num_devices - device) - 1)
        row.add("fF", times=device)
        row.add("fbw", times=num_devices - device)
        while row.counts["f"] < most:
            if row.counts["F"] < most:
                row.add("F")
            row.add("BWfbw")
        row.add("Bb", times=device)
        row.add("BW", times=num_devices - device)
        for letter in "wW":
            row.add(letter, times=most - row.counts[letter])
        rows.append([a for a in row.actions if a.microbatch < num_microbatches])
    return Schedule(rows, name="zb_v")


def dualpipev(num_devices: int, num_microbatches: int) -> Schedule:
    """DualPipeV: DeepSeek's DualPipe, cut in half (DeepSeek-AI 2025).

    DualPipe overlaps the F of one microbatch with the B of another, to hide
    the exchange of experts. Here the two run one after the other, in the
    order of PyTorch's `ScheduleDualPipeV`; the bubble is that of `zb_v`. Two
    devices, W not shown, backward as long as forward::

        device 0  F0 F1 F2 f0 b0 f1 F3 b1 f2 B0 b2    f3 B1 b3 B2    B3
        device 1     F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 b3 B3

    Raises:
        ValueError: If there are fewer microbatches than stages.

    >>> [str(action) for action in dualpipev(1, 2).actions[0]]
    ['F0.0', 'F1.0', 'F0.1', 'B1.0', 'F1.1', 'B0.0', 'B1.1', 'B0.1', 'W0.1']
    """
    check_sizes(num_devices, num_microbatches)
    if num_microbatches < 2 * num_devices:
        raise ValueError(
            "The schedule 'dualpipev' needs at least as many microbatches as "
            "stages, two for each device. Received: "
            f"num_microbatches={num_microbatches} on {num_devices} devices. "
            f"Use num_microbatches={2 * num_devices} or more, or 'zb_v'."
        )
    rows = []
    for device in range(num_devices):
        row = _Row(device, num_devices)
        after = num_devices - 1 - device  # devices after this one
        row.add("F", times=2 * after)
        row.add("Ff", times=device + 1)
        for _ in range(after):
            row.add_late("b")
            row.late_weights()
            row.add("f")
        row.add("FbfB", times=num_microbatches - 2 * num_devices + device + 1)
        row.add("bfB", times=after)
        # The second half of these is without weights, which fill the end.
        for index, letter in enumerate("bB" * (device + 1)):
            (row.add_late if index > device else row.add)(letter)
        for _ in range(after):
            row.late_weights()
            row.add_late("B")
        rows.append(row.actions + row.late)
    return Schedule(rows, name="dualpipev")


class _Row:
    """The actions of a device; small letters are those of its second stage."""

    def __init__(self, device, num_devices):
        self.actions, self.late = [], []
        self.counts = collections.Counter()
        self._stages = device, 2 * num_devices - 1 - device

    def add(self, letters, times=1):
        """The next microbatch of each; a B computes its weights too."""
        for letter in letters * times:
            stage = self._stages[letter.islower()]
            microbatch = self.counts[letter]
            self.actions.append(Action(letter.upper(), stage, microbatch))
            self.counts[letter] += 1

    def add_late(self, letter):
        """A B whose weights come later."""
        self.add(letter)
        self.late.append(self.actions[-1]._replace(kind="W"))

    def late_weights(self):
        if self.late:
            self.actions.append(self.late.pop(0))
