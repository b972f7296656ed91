"""The summary of a pipeline: the layers of each device, and predicted costs."""

import functools
import math
import re
from collections.abc import Callable
from collections.abc import Sequence

import keras
import rich.markup
import rich.table

from tfscale.formatting import colored
from tfscale.formatting import print_table
from tfscale.formatting import readable_bytes
from tfscale.formatting import table_length
from tfscale.pipeline.stages.memory import stage_memory
from tfscale.pipeline.stages.plan import LARGE
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.variables.of_variable import are_states_on_host
from tfscale.variables.of_variable import sharding_of

_LEAST_LENGTH = 64


def print_summary(
    plan: PipelinePlan,
    devices: Sequence[Sequence[str]],
    *,
    optimizer: keras.Optimizer | None = None,
    line_length: int | None = None,
    print_fn: Callable[[str], None] | None = None,
) -> None:
    """Prints a table of the stages, and predictions for a step.

    See `PipelineModel.pipeline_summary`. Before the optimizer has slots, it is
    taken to have two for each variable, as Adam has.
    """
    line_length = table_length(line_length, _LEAST_LENGTH)
    rows = plan.microbatch_size
    num_slots = _num_slots(optimizer, plan)
    memories = stage_memory(plan, rows, num_slots)
    name = rich.markup.escape(plan.graph.functional.name)
    print_table(
        f'[bold]Pipeline: "{name}"[/]',
        _table(plan, devices, memories, line_length),
        _lines(plan, len(devices), memories, rows, num_slots),
        line_length,
        print_fn,
    )


def _table(plan, devices, memories, line_length):
    column = functools.partial(rich.table.Column, no_wrap=True)
    table = rich.table.Table(
        column("Stage", justify="right"),
        rich.table.Column("Layers", ratio=1, min_width=16),
        column("Param #", justify="right"),
        column("FLOPs", justify="right"),
        column("Memory", justify="right"),
        rich.table.Column("Device", overflow="fold"),
        width=line_length,
        show_lines=True,
    )
    # As Keras counts: without the states of random generators.
    weights = {id(v) for v in plan.graph.functional.weights}
    flops = plan.stage_sums(call.flops for call in plan.graph.calls)
    for stage, cost, needed in zip(plan.stages, flops, memories):
        rank = plan.schedule.stage_devices[stage.index]
        parameters = sum(
            math.prod(v.shape)
            for v in plan.variables_at_home(stage.index)
            if id(v) in weights
        )
        memory = [colored(readable_bytes(needed.total))]
        kept = readable_bytes(needed.activations)
        memory.append(f"{needed.in_flight} x {kept}")
        if plan.recompute:
            memory.append(f"+ {readable_bytes(needed.recomputed)}")
        table.add_row(
            colored(stage.index),
            rich.markup.escape(_layers(stage.layers)),
            colored(f"{parameters:,}"),
            colored(f"{100 * cost / sum(flops):.1f} %"),
            "\n".join(memory),
            "\n".join(_short(replica[rank]) for replica in devices),
        )
    return table


def _layers(names):
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ...\n{names[-1]} ({len(names)} layers)"


def _short(device):
    """`CPU:0` for a device of this process, else with job and task."""
    local = device.removeprefix("/job:localhost/replica:0/task:0")
    return re.sub(r"^/|replica:0/|device:", "", local)


def _lines(plan, num_replicas, memories, rows, num_slots):
    schedule, simulation = plan.schedule, plan.simulation
    replicas = f", {colored(num_replicas)} replicas" * (num_replicas > 1)
    yield (
        "Schedule",
        f"{rich.markup.escape(schedule.name)}, "
        f"{colored(schedule.microbatches_per_batch)} microbatches{replicas}"
        f"{', forwards recomputed' * plan.recompute}",
    )
    if schedule.has_updates:
        yield (
            "Window",
            f"{colored(schedule.num_batches)} batches (`steps_per_execution`), "
            "which each update the weights",
        )
        for stage, memory in enumerate(memories):
            if staleness := schedule.staleness(stage):
                yield (
                    f"Weights of stage {stage}",
                    f"up to {colored(staleness)} updates old, "
                    f"{readable_bytes(memory.older_weights)} of older ones",
                )
    yield (
        "Predicted bubble",
        f"{colored(f'{100 * simulation.bubble:.1f}')} % of the devices' time",
    )
    yield (
        "Predicted speed-up over "
        f"{'one' if plan.speeds is None else 'the fastest'} device",
        f"{colored(f'{simulation.speedup:.2f}')} (on "
        f"{colored(schedule.num_devices)} devices)",
    )
    on_host = " (on the host)" * any(map(are_states_on_host, plan.variables))
    # Model ranks divide variables, and so may divide activations.
    has_ranks = any(sharding_of(v).is_sharded for v in plan.variables)
    yield (
        "Memory",
        f"weights, gradients, {colored(f'{num_slots:.3g}')} optimizer slots"
        f" per variable{on_host}, what a backward computes, and "
        "activations: microbatches in flight x one of "
        f"{colored(rows)} {'rows' if rows > 1 else 'row'}"
        f"{', undivided' * has_ranks}",
    )
    graph, num_stages = plan.graph, len(plan.stages)
    if graph.length is not None:
        yield "Unknown lengths", f"taken to be {colored(graph.length)}"
    largest = max(graph.calls, key=lambda call: call.flops)
    most, total = largest.flops, sum(call.flops for call in graph.calls)
    if num_stages > 1 and most * num_stages > LARGE * total:
        yield (
            "Not cut",
            f"{rich.markup.escape(largest.name)} has "
            f"{colored(f'{100 * most / total:.1f}')} % of the FLOPs, which "
            "cannot be cut: no speed-up over "
            f"{colored(f'{total / most:.2f}')}",
        )
    for number, variable in enumerate(plan.variables):
        users = plan.users(variable)
        if len(users) > 1:
            yield (
                "Tied variable",
                f"{rich.markup.escape(variable.path)} of stages "
                f"{', '.join(map(colored, users))} lives in stage "
                f"{colored(plan.homes[number])}",
            )


def _num_slots(optimizer, plan):
    if optimizer is None or not optimizer.built:
        return 2.0

    def size(variables):
        return sum(math.prod(v.shape) for v in variables if len(v.shape))

    trainable = [v for v in plan.variables if v.trainable]
    return size(optimizer.variables) / max(size(trainable), 1)
