"""Devices of unequal speed: who gets how many rows, or how much of the layers.

    speeds=[1, 2], data=2        rows of a batch      0 1 2 3 │ 4 ... 11
    speeds=[1, 2], pipeline=2    cost of the layers       1/3 │ 2/3

A speed is a number without a unit: only ratios count. Losses, metrics and
gradients count by rows, so that unequal parts have the numbers of one device.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfscale.mesh import timing

_RULE = (
    "`speeds` must be a list of numbers above 0, one for each device, or "
    "'measure' for a mesh."
)


class MeshWithSpeeds(keras.distribution.DeviceMesh):
    """A mesh that knows how fast its devices are.

    Attributes:
        speeds: One number above 0 for each device.
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Any,
        speeds: Sequence[float],
    ):
        super().__init__(shape, axis_names, devices)
        self.speeds = tuple(speeds)


def given_speeds(speeds: Any, sizes: dict[str, int]) -> tuple[float, ...]:
    """The speeds as floats, one for each device of axes of these sizes."""
    if isinstance(speeds, np.ndarray):
        speeds = speeds.tolist()
    received = f"Received: speeds={speeds!r}."
    if not isinstance(speeds, list | tuple) or any(
        isinstance(speed, bool) or not isinstance(speed, numbers.Real)
        for speed in speeds
    ):
        raise TypeError(f"{_RULE} {received} Pass a list like [1, 2].")
    found = tuple(map(float, speeds))
    if not all(math.isfinite(speed) and speed > 0 for speed in found):
        raise ValueError(
            f"{_RULE} {received} Leave a device that computes nothing out of "
            "the mesh."
        )
    needed = math.prod(sizes.values())
    if len(found) != needed:
        raise ValueError(
            f"{_RULE} {received} There are {needed} devices: pass as many "
            "numbers."
        )
    return found


def check_axes(speeds: Any, sizes: dict[str, int]) -> None:
    """Refuses axes of a mesh that `speeds` mean nothing for."""
    several = [axis for axis, size in sizes.items() if size > 1]
    if several in ([], ["data"], ["pipeline"]):
        return
    raise ValueError(
        "A mesh with `speeds` may have several devices along 'data' or along "
        "'pipeline' only: rows or layers are divided by them, but not both, "
        "and model ranks have equal shards. Received: "
        f"speeds={speeds!r} with "
        f"{', '.join(f'{axis}={sizes[axis]}' for axis in several)}. Use one "
        "axis, or omit `speeds`."
    )


def measured_seconds(devices: Sequence[str]) -> list[float]:
    """Seconds of a matrix product on each device, one after the other."""
    return [timing.seconds_of_product([name]) for name in devices]


def speeds_by(seconds: Sequence[float]) -> list[float]:
    """Speeds of devices by the seconds of the same work; the slowest has 1.

    They are rounded to fifths, so that noise leaves equal devices equal.

    >>> speeds_by([0.3, 0.31, 0.15])
    [1.0, 1.0, 2.0]
    """
    return [round(5 * float(max(seconds) / each)) / 5 for each in seconds]
