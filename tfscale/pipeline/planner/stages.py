"""Stages of a table of layers, and what a schedule does with them."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfscale.pipeline.planner.layers import Layer
from tfscale.pipeline.planning.named_schedules import get_schedule
from tfscale.pipeline.planning.simulate import simulate

_SUMMED = ("trainable", "frozen", "kept", "undivided", "kept_once")


class StageSums(NamedTuple):
    """Sums over the layers of each stage, one number per stage.

    `forward` and `backward` have a row for each field of `Work`; `crossing` is
    that of the first layer.
    """

    forward: np.ndarray
    backward: np.ndarray
    crossing: np.ndarray
    trainable: np.ndarray
    frozen: np.ndarray
    kept: np.ndarray
    undivided: np.ndarray
    kept_once: np.ndarray


class Rhythm(NamedTuple):
    """What a schedule does, where all stages take the same time.

    Args:
        bubble: Idle time of a device, in times of a microbatch on a device.
        held: Per device, most activations of a stage that it holds at once.
        stage_devices: The device of each stage.
    """

    bubble: float
    held: np.ndarray
    stage_devices: np.ndarray

    def by_device(self, of_stages, combine=np.add) -> np.ndarray:
        """The sum, or what else combines them, over stages of each device."""
        result = np.zeros(len(self.held))
        combine.at(result, self.stage_devices, of_stages)
        return result


def balanced_cuts(
    layers: Sequence[Layer], num_stages: int
) -> tuple[int, ...] | None:
    """Cuts whose dearest stage is the cheapest; None for too few layers.

    As `balance.partition`, in the time that thousands of plans allow.
    """
    if num_stages > len(layers):
        return None
    costs = [layer.forward.flops + layer.backward.flops for layer in layers]
    before = [0, *itertools.accumulate(costs)]

    def cuts(limit):
        found = [0]
        for stage in range(1, num_stages):
            stop = bisect.bisect_right(before, before[found[-1]] + limit) - 1
            # At least one layer for this stage, and for each that follows.
            stop = max(stop, found[-1] + 1)
            found.append(min(stop, len(layers) - num_stages + stage))
        return found

    def fits(limit):
        bounds = itertools.pairwise([*cuts(limit), len(layers)])
        return all(before[b] - before[a] <= limit for a, b in bounds)

    low, high = max(costs), before[-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return tuple(cuts(high)[1:])


def stage_sums(layers: Sequence[Layer], cuts: Sequence[int]) -> StageSums:
    """Adds up the layers between cuts."""
    starts = [0, *cuts]

    def sums(values):
        return np.add.reduceat(np.array(values, float), starts)

    def works(kind):
        rows = zip(*(getattr(layer, kind) for layer in layers), strict=True)
        return np.stack([sums(row) for row in rows])

    return StageSums(
        works("forward"),
        works("backward"),
        np.array([layers[start].crossing for start in starts], float),
        **{
            name: sums([getattr(layer, name) for layer in layers])
            for name in _SUMMED
        },
    )


def rhythm(
    schedule: str,
    num_devices: int,
    num_microbatches: int,
    stages_per_device: int,
    recompute: bool,
) -> Rhythm | None:
    """Bubble and memory of a schedule; None if it cannot have these sizes.

    After two microbatches a device, one more makes a step longer by its own
    time and changes nothing else: so few are simulated.
    """
    few = 2 * num_devices + num_microbatches % num_devices
    few = min(num_microbatches, few)
    return _simulated(schedule, num_devices, few, stages_per_device, recompute)


@functools.cache
def _simulated(schedule, num_devices, num_microbatches, chunks, recompute):
    try:
        made = get_schedule(schedule, num_devices, num_microbatches, chunks)
    except ValueError:
        return None
    found = simulate(
        made, recompute=recompute, activation_bytes=1, stage_input_bytes=1
    )
    # Backward as long as two forwards, or three.
    bubble = found.makespan / (chunks * (3 + recompute)) - num_microbatches
    held = np.array(found.peak_device_bytes)
    return Rhythm(bubble, held, np.array(made.stage_devices))


def divisors(number: int) -> list[int]:
    """All numbers that divide `number`, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
