"""Time and memory of a training step on a mesh, by cause.

Sources: Narayanan et al. 2021 (FLOPs, bubble, bytes of each axis), Korthikanti
et al. 2022 (activations, sequence parallelism), Rajbhandari et al. 2020 (ZeRO).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tfscale import step_memory
from tfscale.planner.device import Device
from tfscale.planner.layers import ModelTable
from tfscale.planner.layers import balanced_cuts
from tfscale.planner.layers import stage_sums
from tfscale.planner.schedule_cost import ScheduleCost
from tfscale.planner.schedule_cost import schedule_cost

# Bytes of a trainable weight: its value, its gradient, the two slots of Adam.
_WEIGHT, _GRADIENT, _SLOTS = 4, 4, 8

# Of all devices at once.
_held_bytes = np.vectorize(step_memory.held_bytes, otypes=[float, float])
_microbatch_peak = np.vectorize(step_memory.microbatch_peak, otypes=[float])


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of a plan.

    The sizes of the axes of `device_mesh`, and arguments of `PipelineModel`
    and `MeshStrategy`.
    """

    data: int = 1
    pipeline: int = 1
    model: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_device: int = 1
    recompute: bool = False
    zero_stage: int = 0
    sequence_parallel: bool = False
    speeds: tuple[float, ...] | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.pipeline * self.model

    @property
    def is_whole(self) -> bool:
        """Whether a replica's batch goes through the model in one piece."""
        return self.pipeline == self.num_microbatches == 1 and not (
            self.recompute
        )

    @property
    def mesh(self) -> str:
        """Sizes of the axes, for a table."""
        return f"{self.data} x {self.pipeline} x {self.model}"

    @property
    def total_speed(self) -> float:
        """The speeds of all devices, added up."""
        return sum(self.speeds or [self.num_devices])

    def changed(self) -> dict[str, Any]:
        """The settings that differ from those of one device."""
        chosen, usual = dataclasses.asdict(self), dataclasses.asdict(Settings())
        return {k: v for k, v in chosen.items() if v != usual[k]}

    def __str__(self) -> str:
        changed = ", ".join(f"{k}={v!r}" for k, v in self.changed().items())
        return changed or "one device"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction of a step; `Plan` documents the attributes."""

    settings: Settings
    seconds: dict[str, float]
    memory: dict[str, float]
    traffic: dict[str, float]
    mfu: float
    examples_per_second: float
    tokens_per_second: float | None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def num_bytes(self) -> float:
        """Bytes of the fullest device."""
        return sum(self.memory.values())

    @property
    def bubble(self) -> float:
        """The part of a step in which a device waits for other stages."""
        return self.seconds["bubble"] / self.step_seconds


@dataclasses.dataclass(eq=False)
class Predictor:
    """Predicts steps of a model.

    `cuts(layers, num_stages, speeds)` divides it, see `balanced_cuts`.
    """

    table: ModelTable
    batch_size: int
    device: Device
    cuts: Callable = balanced_cuts

    def __post_init__(self):
        device, is_half = self.device, self.table.is_half
        self._peak = device.flops if is_half else device.float32_flops
        # Many settings share stages, and the times of these.
        self._layers = functools.cache(self._make_layers)
        self._stages = functools.cache(self._make_stages)
        self._times = functools.cache(self._make_times)
        self._schedule_cost = functools.cache(schedule_cost)

    def predict(self, settings: Settings) -> Prediction:
        """Predicts a step."""
        s, m = settings, settings.num_microbatches
        device = self.device
        num_stages = s.pipeline * s.stages_per_device
        schedule = self._schedule_cost(
            *(s.schedule, s.pipeline, m, s.stages_per_device, s.recompute)
        )
        # All rows, or those that a device of speed 1 has; and the most.
        rows = most_rows = self.batch_size / (s.data * m)
        of_stages = None
        if s.speeds and s.pipeline > 1:
            of_stages = tuple(s.speeds[n] for n in schedule.stage_devices)
        elif s.speeds:
            rows = self.batch_size / (s.total_speed * m)
            most_rows = rows * max(s.speeds)
        cuts, stages = self._stages(s.model, num_stages, of_stages)
        forwards = 1 + s.recompute
        compute, sums = (
            schedule.by_device(forward * forwards + backward)
            for forward, backward in self._times(
                s.model, num_stages, rows, s.sequence_parallel, of_stages
            )
        )
        busy = compute + sums
        sent, send = self._send(s, stages, rows)
        trainable = schedule.by_device(stages.trainable).max()
        gradient_bytes, gradients = gradient_traffic(device, s, trainable)
        updated = schedule.by_device(update_traffic(device, stages)).max()
        wait = self._wait(s.pipeline)
        seconds = {
            "compute": m * compute.mean(),
            "imbalance": wait * m * (busy.max() - busy.mean()),
            "bubble": wait * schedule.bubble * (busy.mean() + send),
            "pipeline axis": m * send,
            "model axis": m * sums.mean(),
            "data axis": gradients,
            "update": updated / self._num_shards(s) / device.memory_bandwidth,
        }
        summed = stages.forward.summed * forwards + stages.backward.summed
        most_summed = schedule.by_device(summed).max()
        traffic = {
            "data": gradient_bytes,
            "pipeline": m * sent,
            "model": m * rows * _ring(s.model) * most_summed,
        }
        speed = self.batch_size / sum(seconds.values())
        tokens = self.table.tokens
        return Prediction(
            settings,
            {cause: float(each) for cause, each in seconds.items()},
            self._memory(s, stages, cuts, schedule, most_rows),
            traffic,
            3 * self.table.flops * speed / (s.total_speed * self._peak),
            speed,
            None if tokens is None else tokens * speed,
        )

    def _make_layers(self, ranks):
        """The same sums, as if each layer were a stage."""
        layers = self.table.by_ranks[ranks]
        return stage_sums(layers, range(1, len(layers)))

    def _make_stages(self, ranks, num_stages, speeds):
        """The cuts of stages, and the sums between them."""
        layers = self.table.by_ranks[ranks]
        cuts = self.cuts(layers, num_stages, speeds)
        return cuts, stage_sums(layers, cuts)

    def _make_times(self, ranks, num_stages, rows, sequence_parallel, speeds):
        """Seconds of each stage for its work, and for sums over model ranks.

        Both are pairs: forward and backward.
        """
        device = self.device
        _, stages = self._stages(ranks, num_stages, speeds)
        link = _link(device, 1, ranks) * device.link_efficiency
        computing, summing = [], []
        # The backward reads weights as the forward does, and writes gradients.
        weights = device.weight_passes * _WEIGHT * stages.trainable
        for work, share in ((stages.forward, 1 / 3), (stages.backward, 2 / 3)):
            moved = work.moved
            if sequence_parallel:
                moved = moved - work.undivided * (1 - 1 / ranks)
            computing.append(
                (
                    rows * work.flops / (self._peak * device.efficiency)
                    + work.products * device.startup
                    + (
                        rows * moved * device.passes
                        + rows * work.drawn * device.random_bytes
                        + share * weights
                    )
                    / device.memory_bandwidth
                )
                / np.array(speeds or 1.0)
            )
            # Where ranks divide the sequence, a sum is two messages.
            messages = work.sums * (ranks > 1) * (1 + sequence_parallel)
            latency = messages * device.latency
            summing.append(rows * work.summed * _ring(ranks) / link + latency)
        return computing, summing

    def _wait(self, pipeline):
        """The cost of a second in which a device waits for other stages.

        Less than one, if these are faster meanwhile; nothing, if a single one
        is as fast as all together.
        """
        if pipeline == 1:
            return 1.0
        speed = min(self.device.speed_alone, pipeline)
        return (pipeline / speed - 1) / (pipeline - 1)

    def _send(self, s, stages, rows):
        """Bytes that a device sends for a microbatch, and the seconds."""
        if s.pipeline == 1:
            return 0.0, 0.0
        device = self.device
        num_bytes = rows * stages.cut_bytes[1:].max()
        num_bytes /= s.model if s.sequence_parallel else 1
        inside = s.model * s.pipeline <= device.devices_per_machine
        link = device.link_bandwidth if inside else device.network_bandwidth
        seconds = num_bytes / (link * device.link_efficiency) + device.latency
        times = 2 * s.stages_per_device
        return times * num_bytes, times * seconds

    def _num_shards(self, s):
        """Number of replicas that divide the slots: those of a machine."""
        if not s.zero_stage:
            return 1
        in_machine = self.device.devices_per_machine // (s.pipeline * s.model)
        return max(1, min(s.data, in_machine))

    def _memory(self, s, stages, cuts, schedule: ScheduleCost, rows):
        """Bytes of the fullest device at the peak, by kind."""
        shards = self._num_shards(s)
        of_weights = shards if s.zero_stage == 3 else 1
        ranks = s.model if s.sequence_parallel else 1
        layers = self._layers(s.model)
        # Bytes of gradients of what a layer writes, and of its weights.
        written = layers.forward.moved
        written = written - layers.forward.undivided * (1 - 1 / ranks)
        gradients = _GRADIENT * layers.trainable
        working = rows * written + layers.kept_once + gradients
        updates = step_memory.update_bytes(
            _GRADIENT * layers.largest, shards, gathers=s.zero_stage == 1
        )
        trainable = schedule.by_device(stages.trainable)
        weights = trainable + schedule.by_device(stages.frozen)
        kinds = {
            "weights": _WEIGHT * weights / of_weights,
            "slots": _SLOTS * trainable / shards,
        }
        if s.zero_stage == 3:
            # A weight and the next one.
            largest = max(layers.largest)
            kinds["gathered"] = np.full_like(weights, 2 * _WEIGHT * largest)
        if s.is_whole:
            kept = layers.kept - layers.undivided * (1 - 1 / ranks)
            moment = step_memory.whole_step_peak(
                rows * kept + layers.kept_once,
                *(working, gradients, updates),
                1 if s.zero_stage == 3 else s.data,
            )
            kinds |= {k: np.array([v]) for k, v in moment._asdict().items()}
        else:
            kept = stages.kept - stages.undivided * (1 - 1 / ranks)
            held, again = _held_bytes(
                rows * kept + stages.kept_once,
                rows * stages.cut_bytes / ranks,
                s.recompute,
            )
            held = schedule.by_device(held) / s.stages_per_device
            held = schedule.held * held
            held += schedule.by_device(again, np.maximum)
            working, updates = (
                schedule.by_device(
                    np.maximum.reduceat(each, [0, *cuts]), np.maximum
                )
                for each in (working, updates)
            )
            peak = _microbatch_peak(held, working, updates)
            kinds["gradients"] = _GRADIENT * trainable
            kinds["activations"] = np.where(peak > updates, held, 0)
            kinds["working"] = peak - kinds["activations"]
        fullest = int(np.argmax(sum(kinds.values())))
        return {kind: float(each[fullest]) for kind, each in kinds.items()}


def update_traffic(device: Device, layers: Any) -> Any:
    """Bytes that updates read and write; `layers` are sums of stages."""
    small, large = layers.trainable - layers.large, layers.large
    return device.small_update_bytes * small + device.update_bytes * large


def gradient_traffic(
    device: Device, settings: Settings, trainable: float
) -> tuple[float, float]:
    """Bytes that a device sends to other replicas in a step, and the seconds.

    `trainable` are the elements of its trainable weights.
    """
    s = settings
    if s.data == 1:
        return 0.0, 0.0
    # Stage 3 gathers weights twice and reduce-scatters gradients.
    times = 1.5 if s.zero_stage == 3 else 1
    num_bytes = times * _ring(s.data) * _GRADIENT * trainable
    link = _link(device, s.pipeline * s.model, s.data)
    link *= device.link_efficiency
    return num_bytes, num_bytes / link + device.latency


def _link(device, distance, size):
    """Bandwidth of a ring of `size` devices, `distance` apart."""
    if distance * size <= device.devices_per_machine:
        return device.link_bandwidth
    # Devices of a machine that are in one ring use its network cards.
    together = max(1, device.devices_per_machine // distance)
    return min(device.link_bandwidth, device.network_bandwidth * together)


def _ring(size):
    """How many times a device sends a tensor in a ring all-reduce."""
    return 2 * (size - 1) / size
