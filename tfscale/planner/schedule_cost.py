"""Costs of schedules: closed forms of the results of `pipeline.simulate`."""

from typing import NamedTuple

import numpy as np


class ScheduleCost(NamedTuple):
    """Costs of a schedule whose stages all take the same time.

    Args:
        bubble: Time in which a device waits, in times of one microbatch.
        held: For each device, the most activations of a stage held at once.
    """

    bubble: float
    held: np.ndarray
    stage_devices: np.ndarray

    def by_device(self, of_stages, combine=np.add) -> np.ndarray:
        """Combines the numbers of each device's stages, by default by a sum."""
        result = np.zeros(len(self.held))
        combine.at(result, self.stage_devices, of_stages)
        return result


def schedule_cost(
    schedule: str,
    num_devices: int,
    num_microbatches: int,
    stages_per_device: int,
    recompute: bool,
) -> ScheduleCost:
    """Costs of `"1f1b"`, `"interleaved"`, `"zb_h1"` or `"zb_v"`.

    All but 1F1B need a multiple of `num_devices` microbatches. The whole
    backward takes as long as two forwards, and B as long as W.

    >>> schedule_cost("1f1b", 4, 16, 1, recompute=False).held
    array([4, 3, 2, 1])
    """
    device = np.arange(num_devices)
    stage_devices = np.tile(device, stages_per_device)
    others = float(num_devices - 1)
    # A device does W while it waits for others (Qi et al. 2024, table 2).
    without_weight = others * (1 + recompute) / (3 + recompute)
    match schedule:
        case "1f1b":
            bubble = others
            held = np.minimum(num_microbatches, num_devices - device)
        case "interleaved":  # Narayanan et al. 2021, section 2.2
            bubble = others / stages_per_device
            held = (1 + stages_per_device) * num_devices - 2 * device - 1
            held = np.minimum(stages_per_device * num_microbatches, held)
        case "zb_h1":
            bubble, held = without_weight, np.full(num_devices, num_devices)
        case "zb_v":
            stage_devices[num_devices:] = device[::-1]
            bubble, held = without_weight, 1 + num_devices + device
            if num_microbatches > num_devices:
                bubble, held = bubble / 2, np.full_like(held, 2 * num_devices)
    return ScheduleCost(bubble, held, stage_devices)
