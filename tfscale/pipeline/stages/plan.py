"""Decisions before a step runs: stages, homes of variables, schedule."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import keras

from tfscale.pipeline.stages.call_costs import CallCosts
from tfscale.pipeline.stages.call_costs import counted_costs
from tfscale.pipeline.stages.call_costs import cut_bytes
from tfscale.pipeline.stages.call_costs import parameters
from tfscale.pipeline.stages.call_costs import tied_weights
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.memory import layer_memory
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.stages.stages import cut
from tfscale.pipeline.stages.trace_costs import trace_costs
from tfscale.schedules.balance import partition
from tfscale.schedules.cut_points import cuts_from_names
from tfscale.schedules.named_schedules import fastest
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import Simulation
from tfscale.schedules.simulate import peak_in_flight
from tfscale.schedules.simulate import simulate
from tfscale.step_memory import microbatch_peak

# A layer with this many times the work of a stage is too large.
LARGE = 1.25
# Rows of a batch at least, as in `fit` by default.
_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A model cut for a schedule.

    Attributes:
        call_costs: Of each call: FLOPs for one example, or measured seconds of
            a microbatch.
        recompute: Whether backwards compute their forwards again.
        microbatch_size: Rows of a microbatch that memory is estimated for.
        memory_limit: Bytes that each device may take, or None.
        speeds: The speed of each device, or None if all are equal.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    schedule: Schedule
    call_costs: CallCosts
    recompute: bool
    microbatch_size: int = 1
    memory_limit: float | None = None
    speeds: tuple[float, ...] | None = None

    @functools.cached_property
    def variables(self) -> tuple[keras.Variable, ...]:
        """All variables of the stages, each once: the n-th has number n."""
        found = {id(v): v for stage in self.stages for v in stage.variables}
        return tuple(found.values())

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each variable, by `id(variable)`."""
        return {id(v): number for number, v in enumerate(self.variables)}

    @functools.cached_property
    def homes(self) -> tuple[int, ...]:
        """The stage where each variable lives: the first that uses it."""
        homes = {}
        for stage in self.stages:
            for variable in stage.variables:
                homes.setdefault(self.numbers[id(variable)], stage.index)
        return tuple(homes[number] for number in range(len(homes)))

    def users(self, variable: keras.Variable) -> list[int]:
        """The stages that use a variable."""
        return [
            stage.index
            for stage in self.stages
            if any(v is variable for v in stage.variables)
        ]

    def variables_at_home(self, stage: int) -> list[keras.Variable]:
        """The variables that live in a stage."""
        return [
            v for v, home in zip(self.variables, self.homes) if home == stage
        ]

    @functools.cached_property
    def simulation(self) -> Simulation:
        """A step, in units of the mean forward of a stage."""
        costs = self.stage_costs
        mean = sum(costs.forward) / len(costs.forward)
        units: dict[str, Any] = {
            kind: [cost / mean for cost in of_stages]
            for kind, of_stages in costs._asdict().items()
        }
        simulation = simulate(self.schedule, recompute=self.recompute, **units)
        if self.speeds is None:
            return simulation
        # The fastest device alone.
        work = sum(self.call_costs.forward) + sum(self.call_costs.backward)
        alone = self.schedule.num_microbatches * work / mean / max(self.speeds)
        return dataclasses.replace(simulation, one_device_time=alone)

    @functools.cached_property
    def stage_costs(self) -> CallCosts:
        """The sums of `call_costs`, of each stage, over its device's speed."""
        costs = CallCosts(*map(self.stage_sums, self.call_costs))
        if self.speeds is None:
            return costs
        speeds = [self.speeds[n] for n in self.schedule.stage_devices]
        return CallCosts(
            *(
                [cost / speed for cost, speed in zip(each, speeds)]
                for each in costs
            )
        )

    def stage_sums(self, of_calls) -> list:
        """Sums over the calls of each stage of one number per call."""
        per_call = iter(of_calls)
        return [
            sum(next(per_call) for _ in stage.calls) for stage in self.stages
        ]


def make_plan(
    model: keras.Model,
    schedule: Schedule,
    balance,
    *,
    recompute: bool = False,
    memory_limit: float | None = None,
    microbatch_size: int = 1,
    measure=None,
    choose_schedule: bool = False,
    flops_per_byte: float = 0,
    length: int | None = None,
    speeds: tuple[float, ...] | None = None,
) -> PipelinePlan:
    """Cuts a model into the stages of a schedule; see `PipelineModel`.

    `microbatch_size` is for estimates of memory; `measure` gives, for each call
    of a `Graph`, what `call_costs` has (balance "time"). With `choose_schedule`
    the `fastest` schedule for the costs of the stages replaces `schedule`. A
    device does `flops_per_byte` while it sends a byte to another one. Sizes
    that inputs leave open count as `length`, see `trace_costs`. Devices of
    `speeds` get stages whose costs are as unequal.
    """
    graph = flatten_model(model)
    _check_layers(graph)
    graph = trace_costs(graph, length)
    num_stages = schedule.num_stages
    if num_stages > len(graph.calls):
        raise ValueError(
            "A pipeline must have at most as many stages as the model has "
            f"layers. Received: {num_stages} stages, and the model "
            f"{model.name!r} with {len(graph.calls)} layers. Use a mesh with "
            f"at most pipeline={len(graph.calls)}."
        )
    call_costs = counted_costs(graph)
    flops = costs = call_costs.training
    allowed_cuts = None
    if balance == "params":
        costs = parameters(graph)
    elif balance == "time":
        call_costs = CallCosts(*zip(*measure(graph), strict=True))
        costs = call_costs.training
    elif isinstance(balance, (list, tuple)):
        names = [call.name for call in graph.calls]
        allowed_cuts = cuts_from_names(names, balance, num_stages)
    elif balance != "flops":
        raise ValueError(
            "`balance` must be 'params', 'flops', 'time' or a list of layer "
            f"names. Received: balance={balance!r}."
        )
    memory = stage_limit = None
    in_flight: int | tuple[int, ...] = 1
    if memory_limit is not None:
        memory = layer_memory(graph, microbatch_size)
        in_flight = peak_in_flight(schedule)
        # Stages that share a device share its limit.
        stage_limit = int(memory_limit * schedule.num_devices / num_stages)
    batch_size = max(
        _BATCH_SIZE, microbatch_size * schedule.microbatches_per_batch
    )
    # Shared weights go to another device, and gradients back, once for each
    # batch. Stages of an asynchronous schedule share none.
    per_byte = math.inf
    if not schedule.has_updates:
        scale = sum(costs) / max(sum(flops), 1)
        per_byte = flops_per_byte / batch_size * scale
    cuts = partition(
        costs,
        num_stages,
        allowed_cuts=allowed_cuts,
        cut_bytes=cut_bytes(graph),
        stage_devices=schedule.stage_devices,
        speeds=speeds,
        tied=[
            (layers, num_bytes * per_byte)
            for layers, num_bytes in tied_weights(graph).items()
            if per_byte
        ],
        memory=memory,
        memory_limit=stage_limit,
        in_flight=in_flight,
        recompute=recompute,
    )
    plan = PipelinePlan(
        graph,
        tuple(cut(graph, cuts)),
        schedule,
        call_costs,
        recompute,
        microbatch_size,
        memory_limit,
        speeds,
    )
    if not choose_schedule:
        return plan
    fits = None
    if memory_limit is not None:
        fits = functools.partial(_fits, plan, memory, memory_limit)
    schedule = fastest(schedule, fits=fits, **plan.stage_costs._asdict())
    return dataclasses.replace(plan, schedule=schedule)


def _fits(plan, memory, memory_limit, schedule):
    per_call = iter(memory)
    of_stages = [
        list(itertools.islice(per_call, len(stage.calls)))
        for stage in plan.stages
    ]
    simulation = simulate(
        schedule,
        recompute=plan.recompute,
        activation_bytes=plan.stage_sums(each.activation for each in memory),
        stage_input_bytes=[calls[0].stage_input for calls in of_stages],
    )
    for device, held in enumerate(simulation.peak_device_bytes):
        of_device = [
            each
            for stage, calls in zip(schedule.stage_devices, of_stages)
            if stage == device
            for each in calls
        ]
        needed = sum(each.fixed for each in of_device) + microbatch_peak(
            held,
            max(each.working for each in of_device),
            max(each.update for each in of_device),
        )
        if needed > memory_limit:
            return False
    return True


def _check_layers(graph):
    for layer in graph.layers:
        if (
            isinstance(layer, keras.layers.BatchNormalization)
            and layer.synchronized
        ):
            # Microbatches run one after the other: the statistics of all
            # cannot be there for the first.
            raise ValueError(
                "A pipeline normalizes every microbatch by itself. "
                f"Received: layer {layer.name!r} with synchronized=True. "
                "Use synchronized=False, or a normalization that does not "
                "depend on the batch (LayerNormalization, "
                "GroupNormalization)."
            )
        if getattr(layer, "stateful", False):
            raise ValueError(
                "A layer in a pipeline cannot pass a state of each row to the "
                "next batch, because microbatches have other and fewer rows. "
                f"Received: layer {layer.name!r} with stateful=True. Use "
                "stateful=False, or train the model itself under "
                "`MeshStrategy`."
            )
