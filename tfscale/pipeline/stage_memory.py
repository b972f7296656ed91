"""How many bytes each stage of a pipeline needs in training, estimated."""

import dataclasses
import functools

import keras

from tfscale import step_memory
from tfscale.pipeline.stages import memory
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.schedules.simulate import peak_in_flight


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
    plan: PipelinePlan, microbatch_size: int, num_slots: float = 2
) -> list[StageMemory]:
    """The memory of each stage; the optimizer has some slots for a variable."""
    graph, rows = plan.graph, microbatch_size
    value_bytes = functools.partial(memory.value_bytes, graph, rows=rows)
    in_flight = peak_in_flight(plan.schedule)
    of_calls = iter(memory.call_memory(graph, rows))
    result = []
    for stage in plan.stages:
        calls = [next(of_calls) for _ in stage.calls]
        activations = sum(each.internal for each in calls)
        activations += value_bytes(set().union(*(x.values for x in calls)))
        if stage is plan.stages[-1]:
            # The loss keeps as much as it is given.
            activations += value_bytes(graph.outputs)
        kept, again = step_memory.held_bytes(
            activations, value_bytes(stage.inputs), plan.recompute
        )
        at_home = variables_at_home(plan, stage.index)
        weights, _, slots = memory.training_bytes(at_home, num_slots)
        # A variable that lives elsewhere has its gradients summed here too.
        trained, gradients, _ = memory.training_bytes(stage.trainable)
        working = (
            memory.working_bytes(graph, call, each, rows)
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
                update=memory.largest_update(at_home),
                older_weights=plan.schedule.staleness(stage.index) * trained,
            )
        )
    return result


def check_older_weights(plan: PipelinePlan) -> None:
    """Refuses versions of weights without room beside what training needs."""
    if plan.memory_limit is None:
        return
    memories = stage_memory(plan, plan.microbatch_size)
    fullest = max(memories, key=lambda memory: memory.total)
    if fullest.total > plan.memory_limit:
        raise ValueError(
            "All versions of the weights that an asynchronous schedule uses "
            "must fit beside them. Received: "
            f"memory_limit={plan.memory_limit:,.0f}, and stage "
            f"{memories.index(fullest)} with {fullest.total:,} bytes, "
            f"{fullest.older_weights:,} of them older weights. Use more "
            "stages, `num_microbatches` > 1 (two versions), or '1f1b'."
        )


def variables_at_home(plan: PipelinePlan, stage: int) -> list[keras.Variable]:
    """The variables that live in a stage."""
    return [v for v, home in zip(plan.variables, plan.homes) if home == stage]
