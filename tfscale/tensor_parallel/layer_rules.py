"""Which rule a layer runs by: the first family that has one for it."""

from tfscale.tensor_parallel import channel_rules
from tfscale.tensor_parallel import dense_rules
from tfscale.tensor_parallel import embedding_rules
from tfscale.tensor_parallel.rules import Rule

_FAMILIES = (dense_rules, embedding_rules, channel_rules)


def make_rule(layer) -> Rule | None:
    """The rule of a built layer; None if its weights are put together."""
    for family in _FAMILIES:
        rule = family.make_rule(layer)
        if rule is not None:
            return rule
    return None
