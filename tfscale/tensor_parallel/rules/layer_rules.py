"""Which rule a layer runs by: the first family that has one for it."""

from tfscale.tensor_parallel.rules import attention_rules
from tfscale.tensor_parallel.rules import channel_rules
from tfscale.tensor_parallel.rules import dense_rules
from tfscale.tensor_parallel.rules import embedding_rules
from tfscale.tensor_parallel.rules.rules import Rule

_FAMILIES = (attention_rules, dense_rules, embedding_rules, channel_rules)


def make_rule(layer) -> Rule | None:
    """The rule of a built layer; None if its weights are gathered."""
    for family in _FAMILIES:
        rule = family.make_rule(layer)
        if rule is not None:
            return rule
    return None


def concerned(callers: list) -> list:
    """The layers that may need a rule when a sharded variable is made.

    Args:
        callers: The layers that are being built, outermost first.

    Returns:
        The layer that makes the variable, and what it is a part of if that is
        a layer with a rule for all of its parts.
    """
    *around, maker = callers
    return [
        *(layer for layer in around if attention_rules.is_attention(layer)),
        maker,
    ]
