"""Finds what a model's layers may leave sharded for the layers after them.

The model is traced once, whole and on one device, into a graph that is thrown
away; in it propagation.py follows the outputs of column-parallel layers.

The layers after a layer are known in a functional or sequential model, and a
layer may be in several. So there is a decision for each model, and that of the
outermost model being called counts. A layer that is called by itself gathers
its output.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import keras

from tfscale._internals import attributes
from tfscale.context import step_context
from tfscale.graphs.noting_scope import outside_scopes
from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel import rank_seeds
from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.rules import sharded_call
from tfscale.tensor_parallel.rules.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingDecision:
    """The outputs of a model that stay sharded.

    Attributes:
        stays_sharded: Whether the output does, by the rule of the layer.
        reasons: Why it does not, where there is a reason.
        drawing: Ids of the states of generators that draw for shards.
        frozen: Layers and variables that were not trainable. Once one is, it
            may need a gradient, or see the whole batch.
        is_inner: Whether other layers may have computed the model's inputs,
            whose gradients are needed then.
    """

    stays_sharded: dict[Rule, bool]
    reasons: dict[Rule, str]
    drawing: frozenset[int]
    frozen: list[keras.Layer | keras.Variable]
    is_inner: bool

    def apply(self) -> None:
        """Applies the decision to the rules."""
        for rule, stays_sharded in self.stays_sharded.items():
            rule.stays_sharded = stays_sharded
            rule.layer.sharded_call.reason = self.reasons.get(rule)


def is_functional(layer: keras.Layer) -> bool:
    """Whether a layer is a functional or a sequential model."""
    kinds = attributes.functional_class() | keras.Sequential
    return isinstance(layer, kinds)


def model_in_call():
    """The model whose decision counts for this thread, or None."""
    model = step_context.current().ranks.model
    if model is not None:
        return model
    for caller in attributes.name_scope_callers():
        if is_functional(caller):
            return caller
    return None


def functional_models(layer) -> Iterator[keras.Model]:
    """The outermost functional and sequential models in a layer, or itself."""
    if is_functional(layer):
        yield layer
        return
    for sublayer in attributes.sublayers(layer):
        yield from functional_models(sublayer)


def _functional(model):
    """The functional model in a Sequential, which changes with its layers."""
    return attributes.functional_in(model) or model


NOT_SEEN = (
    "it is called by code that is not looked into, and not in a functional or "
    "sequential model"
)


def apply_decision(num_ranks: int, rule) -> None:
    """Applies the decision of the model being called to a rule."""
    if rule.is_inner:
        return
    model = model_in_call()
    if model is None:
        rule.reset()
        rule.layer.sharded_call.is_decided = True
        rule.layer.sharded_call.reason = NOT_SEEN
        return
    stays_sharded = _decision_for(model, num_ranks, {rule}).stays_sharded
    rule.stays_sharded = stays_sharded.setdefault(rule, rule.stays_sharded)


def ensure_analyzed(model, num_ranks: int) -> ShardingDecision:
    """Applies the decision of a functional model, after its analysis."""
    rules = {call.rule for call in sharded_calls(model)} - {None}
    decision = _decision_for(model, num_ranks, rules)
    decision.apply()
    return decision


def _is_inner(model):
    """Whether a layer calls a model, or has called it before."""
    decision = _last_decision(model)
    if decision is not None and decision.is_inner:
        return True
    # A stage of a pipeline calls the layers of a model, and not itself.
    callers = attributes.name_scope_callers()
    is_called = step_context.current().ranks.model is None and bool(callers)
    return is_called and callers[0] is not model


def _last_decision(model):
    return getattr(_functional(model), "sharding_decision", None)


def _decision_for(model, num_ranks, rules=frozenset()):
    decision = _last_decision(model)
    if (
        decision is None
        or decision.is_inner != _is_inner(model)
        or any(each.trainable for each in decision.frozen)
        or not rules <= set(decision.stays_sharded)
    ):
        # The current call must not see the losses of the analysis.
        with layer_losses.kept():
            decision = analyze(model, num_ranks)
    return decision


def analyze(model, num_ranks: int) -> ShardingDecision:
    """Decides, and notes, which outputs of a functional model stay sharded."""
    rules = {call.rule for call in sharded_calls(model) if call.rule}
    for rule in rules:
        rule.reset()
    decision, complaint = outside_scopes(
        _analyze, model, num_ranks, rules, _is_inner(model)
    )
    for generator in rank_seeds.generators(model):
        rank_seeds.attach(
            generator, functools.partial(_is_for_shard, generator, num_ranks)
        )
    for call in sharded_calls(model):
        call.is_decided = True
    decision.apply()
    _functional(model).sharding_decision = decision
    if complaint:
        warnings.warn(complaint, stacklevel=2)
    return decision


def _is_for_shard(generator, num_ranks):
    model = model_in_call()
    if model is None:
        return False
    return id(generator.state) in _decision_for(model, num_ranks).drawing


def sharded_calls(model) -> Iterator[sharded_call.ShardedCall]:
    """The `ShardedCall` of each layer with sharded variables."""
    for layer in attributes.flatten_layers(model):
        call = sharded_call.call_of(layer)
        if call is not None:
            yield call


def _analyze(model, num_ranks, rules, is_inner):
    modes, reasons = model_trace.modes_of(model), {}
    try:
        whole = model_trace.trace_model(model, modes=modes)
    except Exception as error:  # whatever layers raise
        return _all_whole(model, rules, is_inner, error)
    inputs = whole.inputs if is_inner else []
    while True:
        trace = whole.as_trace(reasons)
        found = propagation.propagate(
            trace,
            num_ranks=num_ranks,
            differentiable=[*whole.differentiable, *inputs],
            generators=whole.generators.values(),
            retraced=True,
        )
        problems = found.gathered
        for key, call in enumerate(whole.calls):
            why = found.gathered.get(key) or reasons.get(call.rule)
            call.rule.keep_sharded(key in found.sharded, why)
        if not problems:
            # Check that ranks run the same operations.
            local = model_trace.trace_model(model, num_ranks, modes=modes)
            problems = retrace.differing_sources(
                trace, local.as_trace(reasons), found, num_ranks=num_ranks
            )
        if not problems:
            calls = [
                (call.rule, key in found.sink_sharded)
                for key, call in enumerate(
                    whole.calls[: whole.nums_of_calls[0]]
                )
            ]
            asked = {
                rule: reason
                for rule, reason in reasons.items()
                if not rule.layer.sharded_call.is_found
            }
            rules = {*rules, *(rule for rule, _ in calls)}
            decision = ShardingDecision(
                {rule: rule.stays_sharded for rule in rules},
                reasons,
                whole.generators_named(found.sharded_generators),
                _frozen(model),
                is_inner,
            )
            return decision, missing_partners(calls, asked)
        # A layer that is called several times does the same in all calls.
        for key, reason in problems.items():
            reasons.setdefault(whole.calls[key].rule, reason)


def _all_whole(model, rules, is_inner, error):
    """The decision for a model that Keras calls with known sizes only."""
    why = f"the model is not traced: {type(error).__name__}"
    for rule in rules:
        rule.keep_sharded(False, why)
    return ShardingDecision(
        dict.fromkeys(rules, False),
        dict.fromkeys(rules, why),
        frozenset(),
        _frozen(model),
        is_inner,
    ), (
        f"{model.name!r} has whole activations between its sharded layers: "
        "what may stay sharded is found in a graph with the sizes of its "
        f"inputs. Received: {type(error).__name__}: {error}. Give `keras.Input`"
        " all sizes but the batch."
    )


def _frozen(model):
    layers = attributes.flatten_layers(model)
    return [x for x in (*layers, *model.variables) if not x.trainable]


# The beginning of a reason if a layer with weights follows the last sharded
# one.
_CONTRACTIONS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")


def missing_partners(
    calls: Sequence[tuple[Rule, bool]], reasons: Mapping[Rule, str]
) -> str | None:
    """The warning of layers that are sharded without a partner.

    A column-parallel layer pays off if a row-parallel one takes its output
    sharded. Otherwise the output is gathered at once, which is right for logits
    only. `calls` says, in order, whether inputs came sharded; `reasons` why
    outputs are gathered.
    """
    lines = {}
    has_column = follows_column = False
    for index, (rule, _) in enumerate(calls):
        if rule.sink_dim is not None:
            # Whether a sharded layer precedes it.
            has_column, follows_column = False, has_column
        elif rule.source_dim is not None:
            has_column = True
        reason = reasons.get(rule)
        if reason is None:
            continue
        name = rule.layer.name
        before = calls[index - 1] if index else None
        if before and not follows_column and _is_swapped(*before, rule):
            lines[rule] = (
                f"{before[0].layer.name!r} is sharded along its inputs and "
                f"{name!r} after it along its outputs: they are swapped. "
                "Divide the first along its outputs and the second along its "
                "inputs."
            )
        elif "leaves the model" not in reason and (
            index < len(calls) - 1 or reason.startswith(_CONTRACTIONS)
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
    """Whether the rule scatters its input, and the one after it gathers."""
    return (
        rule.sink_dim is not None
        and rule.source_dim is None
        and not came_sharded
        and after.source_dim is not None
        and after.sink_dim is None
    )
