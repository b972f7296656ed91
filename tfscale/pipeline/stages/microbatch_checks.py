"""Checks losses and outputs of a pipeline's microbatches, before it runs."""

from collections.abc import Sequence

from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import keys


def check_losses(plan: PipelinePlan, stages: Sequence) -> None:
    """Refuses to train or evaluate without loss, `add_loss` or regularizer."""
    if (
        stages[-1].losses
        or any(keys.AddedLoss(i) in s.outputs for i, s in enumerate(stages))
        or any(variable.regularizer for variable in plan.variables)
    ):
        return
    raise ValueError(
        "A model must have something to minimize. Received: a model compiled "
        "without `loss`, none of whose layers calls `add_loss` or has a "
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
            "microbatches are concatenated. Received: an output of shape "
            f"{tuple(spec.shape)}, of layer {name!r}, for a microbatch of "
            f"{rows} rows. Use `PipelineModel(model, num_microbatches=1)`, or "
            "wrap a model without that output: `keras.Model(model.inputs, "
            "...)`."
        )


def _is_without_rows(shape, rows):
    if shape.rank == 0:
        return True
    if shape.rank is None or shape[0] is None or rows == 0:
        return False
    # With frames folded into the batch there are several for each row.
    return rows is None or shape[0] == 0 or shape[0] % rows != 0
