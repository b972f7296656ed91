"""The row of docs/numbers.md that explains where numbers differ.

A place that differs has a cause before it: outputs differ by layers; losses and
metrics of equal outputs by themselves; steps from equal losses by what comes
after the losses.
"""

from collections.abc import Collection

from tfscale.comparison.facts import Facts
from tfscale.comparison.numbers import Key

ROUNDING = 'rounding, or a fault: compare with dtype="float64"'
NO_GRADIENT = '"Biases without a gradient": only rounding errors'


def reason_of(key: Key, differing: Collection[Key], facts: Facts) -> str:
    """The likely cause of a difference, and where the page has it.

    `differing` are all numbers that differ.
    """
    if _any(differing, "predict"):
        return _listed("layers across rows", facts.layers) or ROUNDING
    losses = _listed("losses across rows, scalar losses", facts.losses)
    is_loss = key.kind != "log" or key.name.endswith("loss")
    if not is_loss and _is_of(key.name, facts.metrics):
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


def _any(differing, phase):
    return any(key.phase == phase for key in differing)


def _is_of(name, metrics):
    return any(name == m or name.endswith(f"_{m}") for m in metrics)


def _listed(row, names):
    if not names:
        return ""
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f'"{row}": {", ".join(dict.fromkeys(names[:3]))}{more}'
