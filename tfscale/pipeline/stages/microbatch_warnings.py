"""Checks where the numbers of microbatches differ from those of one device."""

import warnings
from collections.abc import Sequence

from tfscale._internals import attributes
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import keys
from tfscale.step import losses
from tfscale.step.checks import across_rows


def check_losses(plan: PipelinePlan, stages: Sequence) -> None:
    """Refuses to train or evaluate without loss, `add_loss` or regularizer."""
    if (
        stages[-1].losses
        or any(keys.AddedLoss(i) in s.outputs for i, s in enumerate(stages))
        or any(variable.regularizer for variable in plan.variables)
    ):
        return
    raise ValueError(
        "A model must have something to minimise. Received: a model compiled "
        "without `loss`, no layer of which calls `add_loss` or has a "
        "regularizer. Pass `loss=` to `compile`."
    )


def check_outputs(plan: PipelinePlan, known: dict, rows: int | None) -> None:
    """Refuses outputs without a row for each row of several microbatches.

    `known` are specs of what the stages make of a microbatch of `rows` rows.
    """
    num_microbatches = plan.schedule.microbatches_per_batch
    if num_microbatches == 1:
        return
    for value in plan.graph.outputs:
        spec = known.get(keys.Activation(value))
        if spec is None or not _is_without_rows(spec.shape, rows):
            continue
        name = next(c for c in plan.graph.calls if value in c.outputs).name
        raise ValueError(
            "Each output must have a row for each row of the batch, because "
            "those of microbatches are concatenated. Received: an "
            f"output of shape {tuple(spec.shape)}, of layer {name!r}, for a "
            f"microbatch of {rows} rows. Use `PipelineModel(model, "
            "num_microbatches=1)`, or wrap a model without that output: "
            "`keras.Model(model.inputs, ...)`."
        )


def _is_without_rows(shape, rows):
    if shape.rank == 0:
        return True
    if shape.rank is None or shape[0] is None or rows == 0:
        return False
    # With frames folded into the batch there are several for each row.
    return rows is None or shape[0] == 0 or shape[0] % rows != 0


def warn(
    plan: PipelinePlan, stages: Sequence, num_replicas: int, training: bool
) -> None:
    """Warns of numbers that differ from those of one device."""
    num_microbatches = plan.schedule.microbatches_per_batch
    if num_microbatches * num_replicas > 1:
        across_rows.warn(
            plan.graph.functional, [x for s in stages for x in s.mixes_rows]
        )
        if training:
            losses.warn_of_reduced(stages[-1].losses)
    if num_microbatches == 1 or not training:
        return
    changed = {
        key.number
        for s in stages
        for key in s.outputs
        if isinstance(key, keys.NewState)
    }
    # Every call should change seeds and metrics.
    expected = set()
    for layer in plan.graph.layers:
        expected.update(map(id, layer.metrics_variables))
        generators = attributes.direct_generators(layer)
        expected.update(id(generator.state) for generator in generators)
    variables = [plan.variables[number] for number in sorted(changed)]
    paths = [v.path for v in variables if id(v) not in expected]
    for path in [*paths, *(name for s in stages for name in s.assigns)]:
        warnings.warn(
            "A layer is called once per microbatch, and on one device once per "
            f"batch. Received: the variable {path!r}, which each call changes: "
            f"{num_microbatches} times per step. A counter, or an average of "
            "what each call sees, comes out differently. Use "
            "`PipelineModel(model, num_microbatches=1)` if that matters.",
            stacklevel=2,
        )
