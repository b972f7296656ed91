"""Predicts time, bubble and memory of a schedule before anything runs."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tfscale.schedules.action import Action
from tfscale.schedules.action import dependencies
from tfscale.schedules.schedule import Schedule


class Span(NamedTuple):
    """When a device did an action, predicted or measured.

    Times are in the unit of the costs, or seconds if they were measured.
    """

    action: Action
    device: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The prediction of `simulate` for one step of one replica.

    Args:
        schedule: The schedule.
        spans: One `Span` per action, in the order of `schedule.order()`.
        one_device_time: The time of one device for the same work, with
            nothing recomputed.
        peak_in_flight: Per stage, as `peak_in_flight` returns it.
        peak_stage_bytes: Per stage, the most activation bytes held at once.
        peak_device_bytes: Per device, the same of all its stages together.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    one_device_time: float
    peak_in_flight: tuple[int, ...]
    peak_stage_bytes: tuple[float, ...]
    peak_device_bytes: tuple[float, ...]

    @functools.cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for span in self.spans)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Per device, the time during which it works."""
        busy = [0.0] * self.schedule.num_devices
        for span in self.spans:
            busy[span.device] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Fraction of the devices' time in which they are idle, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def speedup(self) -> float:
        """How many times as fast as one device that recomputes nothing."""
        return self.one_device_time / self.makespan


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] | None = None,
    weight: float | Sequence[float] | None = None,
    update: float | Sequence[float] = 0.0,
    transfer: float = 0.0,
    recompute: bool = False,
    activation_bytes: float | Sequence[float] = 0,
    stage_input_bytes: float | Sequence[float] = 0,
) -> Simulation:
    """Simulates a schedule with given costs per microbatch.

    Costs may be in any unit of time. Each is one number for all stages or a
    sequence with one per stage.

    Args:
        schedule: The schedule.
        forward: Cost of F.
        backward: Cost of the whole backward, B and W together. Defaults to
            twice the forward: two matrix products in place of one.
        weight: Part of `backward` that is W where the schedule has a W of
            its own; B then costs the rest. Defaults to the half.
        update: Cost of U.
        transfer: Time from the end of an action to the moment at which its
            result is on the device of the next stage. Devices go on working
            meanwhile; nothing is transferred within a device.
        recompute: Whether stages keep only their inputs; each B then begins
            with another forward.
        activation_bytes: What a stage keeps of one microbatch for its
            backward, its input included. With `recompute` it is there only
            during the backward of that microbatch.
        stage_input_bytes: The input of the stage for one microbatch. Only
            used with `recompute`.

    Returns:
        A `Simulation`. A microbatch counts as held from the start of its F
        to the end of its B, or of its W where it has one; what waits in
        transit is not counted.

    Raises:
        ValueError: If a sequence is not one per stage, a number is negative
            or not finite, `weight` exceeds `backward`, or all costs are 0.

    Example: the bubble of GPipe is (S - 1) / (M + S - 1) (Huang et al. 2019,
    section 2.3), whatever the costs are, if all stages cost the same.

    >>> from tfscale.schedules.named_schedules import gpipe
    >>> simulation = simulate(gpipe(2, 7), forward=1.0, backward=2.0)
    >>> simulation.makespan, round(simulation.bubble, 6)
    (24.0, 0.125)
    >>> round(simulation.speedup, 6), simulation.peak_in_flight
    (1.75, (7, 7))
    """
    per_stage = functools.partial(_per_stage, schedule.num_stages)
    forward = per_stage("forward", forward)
    if backward is None:
        backward = [2 * cost for cost in forward]
    backward = per_stage("backward", backward)
    if weight is None:
        weight = [cost / 2 for cost in backward]
    weight = per_stage("weight", weight)
    update = per_stage("update", update)
    (transfer,) = _per_stage(1, "transfer", transfer)
    activation_bytes = per_stage("activation_bytes", activation_bytes)
    stage_input_bytes = per_stage("stage_input_bytes", stage_input_bytes)
    if any(w > b for w, b in zip(weight, backward, strict=True)):
        raise ValueError(
            "`weight` is a part of `backward` and cannot exceed it. Received: "
            f"weight={weight}, backward={backward}. Let `backward` be the "
            "cost of B and W together."
        )
    one_device_time = schedule.num_microbatches * (sum(forward) + sum(backward))
    if one_device_time == 0:
        raise ValueError(
            "At least one stage must take time. Received: forward and "
            "backward are 0 for all stages. Pass costs above 0."
        )

    def cost(action):
        kind, stage, microbatch = action
        if kind != "B":
            return {"F": forward, "W": weight, "U": update}[kind][stage]
        time = backward[stage] + (forward[stage] if recompute else 0.0)
        if schedule.has_weight_action(stage, microbatch):
            time -= weight[stage]
        return time

    kept = stage_input_bytes if recompute else activation_bytes
    recomputed = [
        max(whole - overlap, 0)
        for whole, overlap in zip(activation_bytes, kept, strict=True)
    ]
    peaks = functools.partial(_peaks, schedule, kept, recomputed)
    return Simulation(
        schedule=schedule,
        spans=_play(schedule, cost, transfer),
        one_device_time=one_device_time,
        peak_in_flight=peak_in_flight(schedule),
        peak_stage_bytes=peaks(range(schedule.num_stages)),
        peak_device_bytes=peaks(schedule.stage_devices),
    )


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations it holds at once.

    It follows from the order of actions alone, so it is known before any
    cost is, and balancing under a memory limit can use it.

    >>> from tfscale.schedules.named_schedules import one_f_one_b
    >>> peak_in_flight(one_f_one_b(4, 16))
    (4, 3, 2, 1)
    """
    ones, zeros = [1] * schedule.num_stages, [0] * schedule.num_stages
    peaks = _peaks(schedule, ones, zeros, range(schedule.num_stages))
    return tuple(map(int, peaks))


def _play(schedule, cost, transfer) -> tuple[Span, ...]:
    free_at = [0.0] * schedule.num_devices
    spans = {}
    for action in schedule.order():
        device = schedule.stage_devices[action.stage]
        start = free_at[device]
        for needed in dependencies(action, schedule.num_stages):
            made = spans[needed]
            on_its_way = transfer if made.device != device else 0.0
            start = max(start, made.end + on_its_way)
        free_at[device] = start + cost(action)
        spans[action] = Span(action, device, start, free_at[device])
    return tuple(spans.values())


def _peaks(schedule, kept, recomputed, group_of_stage) -> tuple[float, ...]:
    """The most held at once by each group of stages (stages or devices).

    A microbatch adds `kept` of its stage when its F starts, `recomputed` when
    its B starts, and both go when its last action ends.
    """
    held = [0] * (1 + max(group_of_stage))
    peaks = list(held)
    for device_actions in schedule.actions:
        for kind, stage, microbatch in device_actions:
            group = group_of_stage[stage]
            if kind == "F":
                held[group] += kept[stage]
            elif kind == "B":
                held[group] += recomputed[stage]
            peaks[group] = max(peaks[group], held[group])
            has_weight = schedule.has_weight_action(stage, microbatch)
            if kind == ("W" if has_weight else "B"):
                held[group] -= kept[stage] + recomputed[stage]
    return tuple(peaks)


def _per_stage(num_stages, name, value) -> tuple[float, ...]:
    values = (
        tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
    )
    if len(values) != num_stages:
        raise ValueError(
            f"`{name}` must be one number or one per stage. Received: "
            f"{len(values)} numbers for {num_stages} stages."
        )
    if not all(math.isfinite(number) and number >= 0 for number in values):
        raise ValueError(
            f"`{name}` must be finite and not negative. Received: "
            f"{name}={value}."
        )
    return values
