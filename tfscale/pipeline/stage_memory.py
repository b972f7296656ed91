"""How many bytes each stage of a pipeline needs in training, estimated."""

import dataclasses

import keras

from tfscale.pipeline.planning.simulate import peak_in_flight
from tfscale.pipeline.stages import memory
from tfscale.pipeline.stages.plan import PipelinePlan


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
    """

    weights: int
    gradients: int
    slots: int
    activations: int
    in_flight: int
    recomputed: int

    @property
    def total(self) -> int:
        """The sum of weights, gradients, slots and activations."""
        fixed = self.weights + self.gradients + self.slots
        return fixed + self.in_flight * self.activations + self.recomputed


def stage_memory(
    plan: PipelinePlan, microbatch_size: int, num_slots: float = 2
) -> list[StageMemory]:
    """The memory of each stage, for microbatches of some number of rows.

    The optimizer has `num_slots` slots for a variable.
    """
    graph, rows = plan.graph, microbatch_size
    in_flight = peak_in_flight(plan.schedule)
    of_calls = iter(memory.call_memory(graph, rows))
    result = []
    for stage in plan.stages:
        calls = [next(of_calls) for _ in stage.calls]
        activations = memory.saved_bytes(graph, calls, rows)
        if stage is plan.stages[-1]:
            # The loss keeps as much as it is given.
            activations += memory.value_bytes(graph, graph.outputs, rows)
        kept = activations
        if plan.recompute:
            kept = min(
                memory.value_bytes(graph, stage.inputs, rows), activations
            )
        weights, _, slots = memory.training_bytes(
            variables_at_home(plan, stage.index), num_slots
        )
        # A variable that lives elsewhere has its gradients summed here too.
        _, gradients, _ = memory.training_bytes(stage.variables)
        result.append(
            StageMemory(
                weights=weights,
                gradients=gradients,
                slots=slots,
                activations=kept,
                in_flight=in_flight[stage.index],
                recomputed=activations - kept,
            )
        )
    return result


def variables_at_home(plan: PipelinePlan, stage: int) -> list[keras.Variable]:
    """The variables that live in a stage."""
    return [v for v, home in zip(plan.variables, plan.homes) if home == stage]
