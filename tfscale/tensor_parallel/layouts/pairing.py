"""Layers that are sharded without a partner, and what to do about them.

A column-parallel layer pays if a row-parallel one takes its output sharded.
Else its output is gathered at once, with one exchange more than without.
"""

from collections.abc import Mapping
from collections.abc import Sequence

from tfscale.tensor_parallel.rules.rules import Rule

# How a reason begins if a layer with weights comes after the last sharded one.
_CONTRACTIONS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")


def complaint(
    calls: Sequence[tuple[Rule, bool]], reasons: Mapping[Rule, str]
) -> str | None:
    """What to tell the user, or None.

    The output of the last layer may be gathered: logits, whose softmax or loss
    needs the whole. `calls` says, in their order, whether inputs came sharded;
    `reasons` why outputs are gathered.
    """
    lines = {}
    has_column = follows_column = False
    for place, (rule, _) in enumerate(calls):
        if rule.sink_dim is not None:
            # Whether a layer was there to give it its input.
            has_column, follows_column = False, has_column
        elif rule.source_dim is not None:
            has_column = True
        reason = reasons.get(rule)
        if reason is None:
            continue
        name = rule.layer.name
        before = calls[place - 1] if place else None
        if before and not follows_column and _is_swapped(*before, rule):
            lines[rule] = (
                f"{before[0].layer.name!r} is sharded along its inputs and "
                f"{name!r} after it along its outputs: they are swapped. "
                "Divide the first along its outputs and the second along its "
                "inputs."
            )
        elif "leaves the model" not in reason and (
            place < len(calls) - 1 or reason.startswith(_CONTRACTIONS)
        ):
            lines[rule] = (
                f"{name!r} is sharded along its outputs, but nothing takes "
                f"them so: {reason}. Divide the layer that it feeds along its "
                "inputs, with elementwise operations only in between, or leave "
                "it whole."
            )
    if not lines:
        return None
    return (
        "Layers are sharded over the model axis without a partner, and what "
        "they compute is gathered at once:\n"
        + "\n".join(f"  {line}" for line in lines.values())
        + "\n`tfscale.sharding_summary(model)` shows how each layer runs."
    )


def _is_swapped(rule, came_sharded, after):
    """Whether the first layer scatters its input, and the next one gathers."""
    return (
        rule.sink_dim is not None
        and rule.source_dim is None
        and not came_sharded
        and after.source_dim is not None
        and after.sink_dim is None
    )
