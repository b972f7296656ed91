"""What stays sharded depends on the model that is being called.

A layer may leave its output sharded if what follows it goes on with a part.
What follows is known in a functional or sequential model, and a layer may be in
several: in one that is trained, and in one that ends with the layer. So there
is a decision for each, and that of the outermost model being called counts. A
layer that is called by itself gathers its output.
"""

import contextlib
import dataclasses

import keras

from tfscale import _internals
from tfscale import rank_context
from tfscale.tensor_parallel.rules.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingDecision:
    """What analysis has found for a model.

    Attributes:
        stays_sharded: Whether the output does, by the rule of the layer.
        reasons: Why it does not, where there is a reason.
        drawing: Ids of the states of generators that draw for parts.
    """

    stays_sharded: dict[Rule, bool]
    reasons: dict[Rule, str]
    drawing: frozenset[int]

    def apply(self) -> None:
        """Sets the rules as the model has them."""
        for rule, stays_sharded in self.stays_sharded.items():
            rule.stays_sharded = stays_sharded
            rule.layer.sharded_call.reason = self.reasons.get(rule)


@contextlib.contextmanager
def within(model):
    """Within it, layers are called as parts of a functional model."""
    with rank_context.within(model=model):
        yield


def model_in_call():
    """The model whose decision counts for this thread, or None."""
    model = rank_context.current().calls.model
    if model is not None:
        return model
    for caller in _internals.name_scope_callers():
        if isinstance(caller, _internals.Functional | keras.Sequential):
            return caller
    return None


def decision_of(model) -> ShardingDecision | None:
    """What was noted for a functional or sequential model."""
    return getattr(_functional(model), "sharding_decision", None)


def note(model, decision: ShardingDecision) -> None:
    """Keeps what was decided for a model."""
    _functional(model).sharding_decision = decision


def _functional(model):
    """What a Sequential is inside, and is anew once it has another layer."""
    return _internals.functional_in(model) or model
