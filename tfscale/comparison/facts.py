"""Facts of a model that docs/numbers.md has a row for, from what it declares.

They do not say that numbers differ. Where they do differ, the fact that fits
the place is the likely cause: outputs differ by layers; losses and metrics of
equal outputs by themselves; steps from equal losses by what comes after the
losses.
"""

import dataclasses
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any

import keras

from tfscale._internals import attributes
from tfscale._internals import layers as keras_layers
from tfscale.comparison.numbers import Key

_ACROSS_ROWS = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names of what may differ on parts of a batch, by its kind.

    Attributes:
        batch_norms: BatchNormalization layers that are not synchronized.
        counting: SpectralNormalization layers, which count calls.
        layers: Layers with a `call` that is not Keras'.
        losses: Losses that are not Keras', or compare rows.
        metrics: Metrics with an `update_state` that is not Keras'.
        drawing: Layers that draw random numbers.
        optimizers: Optimizers with an update that is not Keras'.
        has_custom_step: Whether `train_step` is not Keras'.
    """

    batch_norms: Sequence[str]
    counting: Sequence[str]
    layers: Sequence[str]
    losses: Sequence[str]
    metrics: Sequence[str]
    drawing: Sequence[str]
    optimizers: Sequence[str]
    has_custom_step: bool


def facts_of(training: Any) -> Facts:
    """The facts of the model of a `Training`."""
    model = training.inner
    layers = [x for x in attributes.flatten_layers(model) if x is not model]
    norms = keras.layers.BatchNormalization
    return Facts(
        batch_norms=[
            x.name
            for x in layers
            if isinstance(x, norms) and not x.synchronized
        ],
        counting=[
            x.name
            for x in layers
            if isinstance(x, keras.layers.SpectralNormalization)
        ],
        layers=[
            x.name
            for x in layers
            if not keras_layers.is_of_keras(x.__class__.call)
        ],
        losses=_losses(model),
        metrics=_metrics(model.metrics),
        drawing=training.drawing,
        optimizers=_optimizers(model),
        has_custom_step=not attributes.is_step_of_keras(model.train_step),
    )


def _losses(model):
    found = []
    if model.__class__.compute_loss is not keras.Model.compute_loss:
        found.append("compute_loss")
    compiled = attributes.compile_arguments(model).get("loss")
    for loss in keras.tree.flatten(compiled):
        if isinstance(loss, str) or loss is None:
            continue
        kind = loss if callable(loss) and hasattr(loss, "__name__") else None
        kind = kind or loss.__class__
        if not keras_layers.is_of_keras(kind) or isinstance(loss, _ACROSS_ROWS):
            found.append(getattr(loss, "name", None) or kind.__name__)
    return found


def _metrics(metrics):
    found = []
    for metric in metrics:
        inner = getattr(metric, "metrics", ())
        code: Any = metric.__class__.update_state
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            code = attributes.metric_function(metric)
        if not keras_layers.is_of_keras(code):
            found.append(metric.name)
        found += _metrics(inner)
    return found


def _optimizers(model):
    optimizer = model.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    methods = ("apply", "update_step")
    return [
        optimizer.__class__.__name__
        for method in methods
        if optimizer is not None
        and not keras_layers.is_of_keras(getattr(optimizer.__class__, method))
    ][:1]


ROUNDING = 'rounding, or a fault: compare with dtype="float64"'


def reason_of(key: Key, differing: Collection[Key], facts: Facts) -> str:
    """The likely cause of a difference, and where the page has it.

    `differing` are all numbers that differ.
    """
    if any(each.phase == "predict" for each in differing):
        return _listed("layers across rows", facts.layers) or ROUNDING
    losses = _listed("losses across rows, scalar losses", facts.losses)
    is_loss = key.kind != "log" or key.name.endswith("loss")
    if not is_loss and any(
        key.name == m or key.name.endswith(f"_{m}") for m in facts.metrics
    ):
        return _listed("metrics that are not sums", [key.name])
    before = [k for k in differing if k.phase == "evaluate"]
    if any(k.name.endswith("loss") for k in before):
        return losses or ROUNDING
    if key.phase == "evaluate":
        return ROUNDING
    norms = _listed("`BatchNormalization` in training", facts.batch_norms)
    counting = _listed("counters, averages over calls", facts.counting)
    draws = _listed("dropout, noise, random augmentation", facts.drawing)
    custom_step = '"Gradients changed by hand", "A step of your own"'
    optimizers = _listed("an optimizer of your own", facts.optimizers)
    return (
        draws
        or norms
        or counting
        or custom_step * facts.has_custom_step
        or optimizers
        or _listed("layers across rows", facts.layers)
        or losses
        or ROUNDING
    )


def _listed(row, names):
    if not names:
        return ""
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f'"{row}": {", ".join(dict.fromkeys(names[:3]))}{more}'
