"""How many bytes stages need in training: estimated, or exact if traced."""

import dataclasses
import math
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfscale import step_memory
from tfscale.graphs.memory import buffer_of
from tfscale.graphs.memory import tensor_bytes
from tfscale.pipeline.stages.graph import Call
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.stages.trace_costs import map_calls
from tfscale.pipeline.stages.trace_costs import tensor_spec
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.phases import Phase
from tfscale.schedules.balance import LayerMemory
from tfscale.schedules.simulate import peak_in_flight
from tfscale.variables.of_variable import are_states_on_host
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.of_variable import state_sharding_of


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A constant of a function, in the place of a key."""


# Tensors that go from stage to stage, and tensors of no microbatch.
_PASSED = (keys.Mask, keys.Activation)
_NOT_KEPT = (_Constant, keys.Param, keys.Target)


def training_bytes(
    variables: Iterable[keras.Variable], num_slots: float = 2
) -> tuple[int, int, int]:
    """Bytes of variables, of their gradients and of their optimizer slots.

    They are those of one device, if model ranks divide variables, or replicas
    slots; it has no slots that are on the host.
    """
    weights = gradients = slots = 0
    for variable in variables:
        sharding = sharding_of(variable)
        weights += sharding.local_bytes
        if variable.trainable:
            # Sums of gradients have at least float32.
            size = max(sharding.itemsize, 4)
            gradients += math.prod(sharding.local_shape) * size
            if not are_states_on_host(variable):
                slots += state_sharding_of(variable).local_bytes
    return weights, gradients, int(num_slots * slots)


def largest_update(variables: Iterable[keras.Variable]) -> int:
    """The most bytes that the update of one of the variables needs."""
    found = [0]
    for variable in variables:
        if variable.trainable:
            _, gradient, _ = training_bytes([variable])
            whole = sharding_of(variable).local_bytes
            shards = whole // state_sharding_of(variable).local_bytes
            found.append(step_memory.update_bytes(gradient, shards, True))
    return int(max(found))


@dataclasses.dataclass(frozen=True)
class CallMemory:
    """The memory that a call keeps of a microbatch, if it is not recomputed.

    Attributes:
        internal: Bytes that no other call sees: attention weights, say.
        values: Inputs and outputs of the call that its backward reads. They
            may be kept by others too.
        drawn: Random numbers that its forward draws: for dropout, say.
    """

    internal: int
    values: frozenset[Value]
    drawn: int


def call_memory(
    graph: Graph, rows: int, *, grappler: bool = True
) -> list[CallMemory]:
    """The memory that each call keeps of a microbatch of `rows` examples.

    Without Grappler, which folds constants, a model of any size takes little
    memory to trace; the estimate is up to a tenth higher.
    """
    # Functions for XLA are not optimized.
    found = map_calls(_saved_by_call, graph, rows, jit_compile=not grappler)
    first_of, result = {}, []
    for call, (internal, kept, shared, drawn) in zip(graph.calls, found):
        values = _values_of(call)
        for one, other in shared:
            first = values[other]
            first_of[values[one]] = first_of.get(first, first)
        kept_values = (first_of.get(values[i], values[i]) for i in kept)
        result.append(CallMemory(internal, frozenset(kept_values), drawn))
    return result


def layer_memory(graph: Graph, rows: int) -> list[LayerMemory]:
    """The memory of each call, as `partition` takes it."""
    memory = call_memory(graph, rows)
    kept = set().union(*(each.values for each in memory))
    counted, result = set(), []
    for call, kept_by_call in zip(graph.calls, memory):
        variables = [v for v in call.variables if id(v) not in counted]
        counted.update(map(id, variables))
        # A tensor that several calls keep belongs to the one that makes it;
        # what is fed to the model, to the first that keeps it.
        values = {*call.outputs, *kept_by_call.values} & kept
        kept -= values
        activation = kept_by_call.internal + value_bytes(graph, values, rows)
        if call is graph.calls[-1]:
            # The loss keeps as much as it is given.
            activation += value_bytes(graph, graph.outputs, rows)
        result.append(
            LayerMemory(
                sum(training_bytes(variables)),
                activation,
                value_bytes(graph, set(call.inputs), rows),
                working_bytes(graph, call, kept_by_call, rows),
                largest_update(variables),
            )
        )
    return result


def working_bytes(
    graph: Graph, call: Call, memory: CallMemory, rows: int
) -> int:
    """Bytes of gradients beside what is kept, while a call's backward runs.

    They are those of its outputs, of what only it keeps, and of its weights,
    before they are added to the sums.
    """
    _, of_weights, _ = training_bytes(call.variables)
    return memory.internal + value_bytes(graph, call.outputs, rows) + of_weights


def value_bytes(graph: Graph, values: Iterable[Value], rows: int) -> int:
    """Bytes of tensors of the model with `rows` examples."""
    return sum(
        tensor_bytes(tensor_spec(graph, value, rows)) for value in values
    )


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage needs on a device in training, estimated.

    Variables, gradients and slots count as model ranks and replicas divide
    them; activations count whole on every rank.

    Attributes:
        weights: Of the variables that live there.
        gradients: Sums of gradients.
        slots: Of the optimizer.
        activations: What one microbatch keeps until its backward.
        in_flight: Microbatches that are there at once, at most.
        recomputed: What is computed again of one of them, in its backward.
        working: Gradients while the backward of a call runs, of the call that
            has most of them.
        update: Of the update of the weight that needs most, in which there are
            no activations.
        older_weights: Versions of the weights that backwards still need, in
            an asynchronous schedule.
    """

    weights: int
    gradients: int
    slots: int
    activations: int
    in_flight: int
    recomputed: int
    working: int
    update: int
    older_weights: int

    @property
    def total(self) -> int:
        """The most that is there at once, of all microbatches in flight."""
        fixed = self.weights + self.gradients + self.slots + self.older_weights
        held = self.in_flight * self.activations + self.recomputed
        return fixed + int(
            step_memory.microbatch_peak(held, self.working, self.update)
        )


def stage_memory(
    plan: Any, rows: int, num_slots: float = 2
) -> list[StageMemory]:
    """The memory of each stage of a `PipelinePlan`.

    A microbatch has `rows` rows, a trainable variable `num_slots` slots.
    """
    graph, in_flight = plan.graph, peak_in_flight(plan.schedule)
    of_calls = iter(call_memory(graph, rows))
    result = []
    for stage in plan.stages:
        calls = [next(of_calls) for _ in stage.calls]
        activations = sum(each.internal for each in calls)
        activations += value_bytes(
            graph, set().union(*(x.values for x in calls)), rows
        )
        if stage is plan.stages[-1]:
            # The loss keeps as much as it is given.
            activations += value_bytes(graph, graph.outputs, rows)
        inputs = value_bytes(graph, stage.inputs, rows)
        kept, again = step_memory.held_bytes(
            activations, inputs, plan.recompute
        )
        at_home = plan.variables_at_home(stage.index)
        weights, _, slots = training_bytes(at_home, num_slots)
        # A variable that lives elsewhere has its gradients summed here too.
        trained, gradients, _ = training_bytes(stage.trainable)
        working = (
            working_bytes(graph, call, each, rows)
            for call, each in zip(stage.calls, calls)
        )
        result.append(
            StageMemory(
                weights=weights,
                gradients=gradients,
                slots=slots,
                activations=kept,
                in_flight=in_flight[stage.index],
                recomputed=again,
                working=max(working),
                update=largest_update(at_home),
                older_weights=plan.schedule.staleness(stage.index) * trained,
            )
        )
    return result


def check_older_weights(plan: Any) -> None:
    """Refuses older versions of weights that do not fit the memory limit."""
    if plan.memory_limit is None:
        return
    memories = stage_memory(plan, plan.microbatch_size)
    fullest = max(memories, key=lambda memory: memory.total)
    if fullest.total > plan.memory_limit:
        raise ValueError(
            "All versions of the weights that an asynchronous schedule uses "
            "must fit the memory limit. Received: "
            f"memory_limit={plan.memory_limit:,.0f}, and stage "
            f"{memories.index(fullest)} with {fullest.total:,} bytes, "
            f"{fullest.older_weights:,} of them older weights. Use more "
            "stages, `num_microbatches` > 1 (two versions), or '1f1b'."
        )


def _saved_by_call(stage, phases):
    """Internal bytes, indices of kept values, shared buffers, random numbers.

    Buffers are shared by pairs of values.
    """
    positions = {
        keys.Activation(value): position
        for position, value in enumerate(_values_of(stage.calls[0]))
    }
    index_of, shared = dict(positions), []
    for key, buffer in _buffers(phases["F"]).items():
        if key in positions:
            if buffer in positions:
                shared.append((positions[key], positions[buffer]))
            else:
                index_of[buffer] = positions[key]
    kept = saved_buffers(phases)
    return (
        sum(size for buffer, size in kept.items() if buffer not in index_of),
        frozenset(index_of[buffer] for buffer in kept if buffer in index_of),
        shared,
        _random_numbers(phases["F"].function.graph),
    )


def _random_numbers(graph: tf.Graph) -> int:
    """Elements of the random tensors that the operations of a graph make."""
    return sum(
        operation.outputs[0].shape.num_elements() or 0
        for operation in graph.get_operations()
        if operation.type.startswith(
            ("StatelessRandomUniform", "RandomUniform")
        )
    )


def _values_of(call: Call) -> list[Value]:
    return [*dict.fromkeys(call.inputs), *call.outputs]


def saved_buffers(phases: Mapping[str, Phase]) -> dict[Hashable, int]:
    """Bytes of each buffer that a stage keeps of a microbatch from F to B or W.

    They are of results of the forward and of inputs of the stage. Parameters,
    constants, targets, workspace and the loops of recurrent layers do not
    count.

    Raises:
        ValueError: If a size is not known: stages must be traced for training,
            with a number of rows that the number of microbatches divides.
    """
    later: dict[Hashable, Any] = {}
    for letter, phase in phases.items():
        if letter != "F":
            later.update(zip(phase.inputs, phase.function.inputs))
    buffers = _buffers(phases["F"])
    return {
        buffers.get(key, key): tensor_bytes(tensor)
        for key, tensor in later.items()
        if key in buffers or isinstance(key, _PASSED)
        if not isinstance(buffers.get(key, key), _NOT_KEPT)
    }


def _buffers(phase: Phase) -> dict[Hashable, Hashable]:
    """For each result the key of the argument, or the tensor, that it is."""
    arguments = dict(zip(map(id, phase.function.inputs), phase.inputs))
    buffers = {}
    for key, tensor in zip(phase.outputs, phase.function.outputs):
        tensor = buffer_of(tensor)
        made = tensor.name
        if tensor.op.type in ("Const", "Placeholder"):
            made = _Constant()  # or what the function captured
        buffers[key] = arguments.get(id(tensor), made)
    return buffers
