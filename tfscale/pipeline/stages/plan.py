"""Decisions before a step runs: stages, homes of variables, schedule."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.pipeline.planning.balance import LayerMemory
from tfscale.pipeline.planning.balance import partition
from tfscale.pipeline.planning.cut_points import cuts_from_names
from tfscale.pipeline.planning.named_schedules import fastest
from tfscale.pipeline.planning.schedule import Schedule
from tfscale.pipeline.planning.simulate import Simulation
from tfscale.pipeline.planning.simulate import peak_in_flight
from tfscale.pipeline.planning.simulate import simulate
from tfscale.pipeline.stages import memory as memory_lib
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.stages.graph import flatten_model
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.stages.stages import cut
from tfscale.pipeline.stages.trace_costs import trace_costs

# How many times the work of a stage a layer has to have, to be too large.
LARGE = 1.25
# Rows of a batch at least, as in `fit` by default.
_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A model cut for a schedule.

    Attributes:
        graph: The model.
        stages: The stages.
        schedule: The schedule.
        flops: Forward FLOPs of each call of the model, for one example.
        call_costs: For each call, the cost of F, of B and W together, and of W
            alone: FLOPs for one example, or measured seconds of a microbatch.
        recompute: Whether backwards compute their forwards again.
        microbatch_size: Rows of a microbatch that memory is estimated for.
        length: The size that unknown sizes of inputs have, see `trace_costs`.
        memory_limit: Bytes that each device may take, or None.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    schedule: Schedule
    flops: tuple[int, ...]
    call_costs: tuple[Sequence[float], Sequence[float], Sequence[float]]
    recompute: bool
    microbatch_size: int = 1
    length: int | None = None
    memory_limit: float | None = None

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

    @property
    def made(self) -> set[Value]:
        """The values that calls make: all but the inputs of the model."""
        return set(self.graph.specs) - set(self.graph.inputs)

    @functools.cached_property
    def simulation(self) -> Simulation:
        """A step, in units of the mean forward of a stage."""
        forward, backward, weight = self.stage_costs
        mean = sum(forward) / len(forward)
        return simulate(
            self.schedule,
            forward=[cost / mean for cost in forward],
            backward=[cost / mean for cost in backward],
            weight=[cost / mean for cost in weight],
            recompute=self.recompute,
        )

    @functools.cached_property
    def stage_costs(self) -> tuple[list, list, list]:
        """The costs of `call_costs`, of each stage."""
        forward, backward, weight = map(self.stage_sums, self.call_costs)
        return forward, backward, weight

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
) -> PipelinePlan:
    """Cuts a model into the stages of a schedule; see `PipelineModel`.

    `microbatch_size` is for estimates of memory; `measure` gives, for each call
    of a `Graph`, what `call_costs` has (balance "time"). With `choose_schedule`
    the `fastest` schedule for the costs of the stages replaces `schedule`. A
    device does `flops_per_byte` while it sends a byte to another one.
    """
    graph = flatten_model(model)
    _check_synchronized(graph.calls)
    if schedule.num_microbatches > 1 or schedule.has_updates:
        _check_stateful(graph.calls, schedule.microbatches_per_batch)
    num_stages = schedule.num_stages
    traced = trace_costs(graph)
    graph = traced.graph
    if num_stages > len(graph.calls):
        raise ValueError(
            "A pipeline must have at most as many stages as the model has "
            f"layers. Received: {num_stages} stages, and the model "
            f"{model.name!r} with {len(graph.calls)} layers. Use a mesh with "
            f"pipeline={len(graph.calls)} or less."
        )
    call_costs = traced.flops, *_backward_flops(graph, traced.flops)
    flops = costs = _training_costs(call_costs)
    allowed_cuts = None
    if balance == "params":
        costs = parameters(graph)
    elif balance == "time":
        call_costs = tuple(zip(*measure(graph), strict=True))
        costs = _training_costs(call_costs)
    elif isinstance(balance, (list, tuple)):
        names = [call.name for call in graph.calls]
        allowed_cuts = cuts_from_names(names, balance, num_stages)
    elif balance != "flops":
        raise ValueError(
            "`balance` must be 'params', 'flops', 'time' or a list of layer "
            f"names. Received: balance={balance!r}."
        )
    limits = {}
    if memory_limit is not None:
        limits = {
            "memory": _layer_memory(graph, microbatch_size),
            # Of a device that stages share, each gets its part.
            "memory_limit": int(
                memory_limit * schedule.num_devices / num_stages
            ),
            "in_flight": peak_in_flight(schedule),
            "recompute": recompute,
        }
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
        tied=[
            (layers, num_bytes * per_byte)
            for layers, num_bytes in _tied(graph).items()
            if per_byte
        ],
        **limits,
    )
    stages = tuple(cut(graph, cuts))
    plan = PipelinePlan(
        graph,
        stages,
        schedule,
        traced.flops,
        call_costs,
        recompute,
        microbatch_size,
        traced.length,
        memory_limit,
    )
    if not choose_schedule:
        return plan
    fits = None
    if memory_limit is not None:
        fits = functools.partial(_fits, plan, limits["memory"], memory_limit)
    forward, backward, weight = plan.stage_costs
    schedule = fastest(
        schedule, forward=forward, backward=backward, weight=weight, fits=fits
    )
    return dataclasses.replace(plan, schedule=schedule)


def _fits(plan, memory, memory_limit, schedule):
    simulation = simulate(
        schedule,
        recompute=plan.recompute,
        activation_bytes=plan.stage_sums(each.activation for each in memory),
        stage_input_bytes=plan.stage_sums(
            each.stage_input if call is stage.calls[0] else 0
            for stage in plan.stages
            for call, each in zip(stage.calls, memory)
        ),
    )
    needed = list(simulation.peak_device_bytes)
    fixed = plan.stage_sums(each.fixed for each in memory)
    for device, num_bytes in zip(schedule.stage_devices, fixed, strict=True):
        needed[device] += num_bytes
    return max(needed) <= memory_limit


def _training_costs(call_costs):
    """What each call costs in training."""
    forward, backward, _ = call_costs
    return [f + b for f, b in zip(forward, backward, strict=True)]


def _tied(graph):
    """Bytes of weights that several calls share, and of their gradients."""
    variables, users = {}, collections.defaultdict(dict)
    for index, call in enumerate(graph.calls):
        for variable in call.variables:
            variables[id(variable)] = variable
            users[id(variable)][index] = None
    tied = collections.Counter()
    for key, calls in users.items():
        if len(calls) > 1:
            weights, gradients, _ = memory_lib.training_bytes([variables[key]])
            tied[tuple(calls)] += weights + gradients
    return tied


def _backward_flops(graph, flops):
    """FLOPs of the backward of each call, and those of them that are W.

    The gradients of inputs, and those of weights, take as much as the forward.
    Without trainable layers before it a call needs no gradient of its inputs;
    it counts where its weights are trained, as the first layer is small.
    """
    reached, backward, weight = set(), [], []
    for call, forward in zip(graph.calls, flops, strict=True):
        variables = call.variables
        trains = any(variable.trainable for variable in variables)
        passes = any(value in reached for value in call.inputs)
        if trains or passes:
            reached.update(call.outputs)
        # Both operands of a product of activations have a gradient.
        times = 2 if trains or not variables else 1
        backward.append(times * forward if trains or passes else 0)
        weight.append(forward if trains else 0)
    return backward, weight


def cut_bytes(graph):
    """Bytes that cross a cut just before each call, unknown sizes as 1."""
    last_use = {value: len(graph.calls) for value in graph.outputs}
    for index, call in reversed(list(enumerate(graph.calls))):
        for value in call.inputs:
            last_use.setdefault(value, index)
    totals = [0] * (len(graph.calls) + 1)
    for index, call in enumerate(graph.calls):
        for value in call.outputs:
            spec = graph.specs[value]
            sizes = (size or 1 for size in spec.shape)
            size = math.prod(sizes) * tf.as_dtype(spec.dtype).size
            for cut_before in range(index + 1, last_use.get(value, index) + 1):
                totals[cut_before] += size
    return totals[: len(graph.calls)]


def _layers_of(calls):
    for call in calls:
        if isinstance(call.operation, keras.layers.Layer):
            yield from attributes.flatten_layers(call.operation)


def _check_synchronized(calls):
    for layer in _layers_of(calls):
        if (
            isinstance(layer, keras.layers.BatchNormalization)
            and layer.synchronized
        ):
            # Microbatches run one after the other: the statistics of all
            # cannot be there for the first.
            raise ValueError(
                "A pipeline normalises every microbatch by itself. "
                f"Received: layer {layer.name!r} with synchronized=True. "
                "Use synchronized=False, or a normalisation that does not "
                "depend on the batch (LayerNormalization, "
                "GroupNormalization)."
            )


def _check_stateful(calls, num_microbatches):
    for layer in _layers_of(calls):
        if getattr(layer, "stateful", False):
            raise ValueError(
                "A layer that hands a state for each row on to the next "
                "batch cannot be cut into microbatches, which are other "
                f"rows and fewer. Received: layer {layer.name!r} with "
                f"stateful=True, num_microbatches={num_microbatches}. Use "
                "stateful=False, or num_microbatches=1."
            )


def parameters(graph: Graph) -> list[int]:
    """Parameters of each call's layer; of a layer called twice, once."""
    seen, counts = set(), []
    for call in graph.calls:
        new = [v for v in call.variables if id(v) not in seen]
        seen.update(map(id, new))
        counts.append(sum(math.prod(v.shape) for v in new))
    return counts


def _layer_memory(graph, rows):
    memory = memory_lib.call_memory(graph, rows)
    kept = set().union(*(each.values for each in memory))
    counted, result = set(), []
    for call, kept_by_call in zip(graph.calls, memory):
        variables = [v for v in call.variables if id(v) not in counted]
        counted.update(map(id, variables))
        # A tensor that several calls keep belongs to the one that makes it;
        # what is fed to the model, to the first that keeps it.
        values = {*call.outputs, *kept_by_call.values} & kept
        kept -= values
        activation = kept_by_call.internal
        activation += memory_lib.value_bytes(graph, values, rows)
        if call is graph.calls[-1]:
            # The loss keeps as much as it is given.
            activation += memory_lib.value_bytes(graph, graph.outputs, rows)
        result.append(
            LayerMemory(
                fixed=sum(memory_lib.training_bytes(variables)),
                activation=activation,
                stage_input=memory_lib.value_bytes(
                    graph, set(call.inputs), rows
                ),
            )
        )
    return result
