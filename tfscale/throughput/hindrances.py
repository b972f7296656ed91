"""Says what holds steps back, where it is clear."""

import math
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

from tfscale.pipeline.model import PipelineModel
from tfscale.planner.cost import Settings
from tfscale.planner.cost import gradient_traffic
from tfscale.planner.device import Device

# A share of the time that is worth a change.
_LARGE = 0.1


class Hindrance(NamedTuple):
    """A cause, the share of the time that it takes, and a sentence on it."""

    share: float
    cause: str
    sentence: str


def hindrance(
    model: Any, input_wait: float | None, seconds: float, device: Device | None
) -> Hindrance | None:
    """The largest cause that takes over a tenth of the time, or None.

    `seconds` are of a step of one batch, `input_wait` is a share of the time.
    """
    found = _all(model, input_wait, seconds, device)
    largest = max(found, default=None)
    return largest if largest and largest.share > _LARGE else None


def _all(model, input_wait, seconds, device) -> Iterator[Hindrance]:
    if input_wait is not None:
        yield Hindrance(
            input_wait,
            "input",
            f"Steps wait for input {input_wait:.0%} of the time. "
            "`tfscale.data.explain(dataset)` says which stage is slow.",
        )
    if isinstance(model, PipelineModel) and len(model.plan.stages) > 1:
        bubble = model.plan.simulation.bubble
        yield Hindrance(
            bubble,
            "pipeline",
            f"Devices wait for other stages {bubble:.0%} of the time, as the "
            "schedule predicts. Use more microbatches.",
        )
    strategy = model.distribute_strategy
    if device is None or not hasattr(strategy, "mesh"):
        return
    # By links of the planner's, as if nothing was computed meanwhile.
    shape = dict(zip(strategy.mesh.axis_names, strategy.mesh.shape))
    settings = Settings(
        data=shape.get("data", 1),
        pipeline=shape.get("pipeline", 1),
        model=shape.get("model", 1),
        zero_stage=strategy.extended.config.zero_stage,
    )
    weights = sum(math.prod(v.shape) for v in model.trainable_variables)
    ranks = settings.pipeline * settings.model
    _, sending = gradient_traffic(device, settings, weights / ranks)
    share = min(sending / seconds, 1.0)
    yield Hindrance(
        share,
        "replicas",
        f"Gradients take {share:.0%} of the time between replicas, as the "
        f"links of {device.name} predict. Larger batches, or "
        "`GradientAccumulation`, send them less often.",
    )
