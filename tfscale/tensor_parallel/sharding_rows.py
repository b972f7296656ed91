"""How each layer of a sharded model runs, and its shard on a device."""

import dataclasses

import keras

from tfscale._internals import attributes
from tfscale._internals import layers
from tfscale.formatting import readable_bytes
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel.rules import sharded_call
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel import sequence_model
from tfscale.variables.of_variable import sharding_of
from tfscale.variables.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer in the summary."""

    path: str
    how: str
    variables: list[tuple[str, Sharding]]
    exchanged: tuple[str, ...]
    reason: str | None


def rows(model: keras.Model, plan: sequence.SequencePlan | None) -> list[Row]:
    """A row for each layer with variables, or with a rule."""
    found, seen = [], set()
    for layer in attributes.flatten_layers(model):
        direct = [
            variable
            for variable in attributes.direct_variables(layer)
            if id(variable) not in seen
        ]
        seen.update(map(id, direct))
        call = sharded_call.call_of(layer)
        if not direct and (call is None or call.rule is None):
            continue
        shardings = [sharding_of(v) for v in direct]
        how, exchanged, reason = _how(call, shardings)
        divided = [s for s in shardings if s.data_dim is not None]
        if divided:
            how = "fully sharded" if how == "replicated" else how
            missing = sum(s.shard_bytes - s.local_bytes for s in divided)
            size = readable_bytes(missing)
            exchanged += (
                "over replicas: all-gather of weights, forward and backward, "
                f"{size}; reduce-scatter of gradients, {size}",
            )
        if plan is not None:
            exchanged = _exchanged_by_plan(layer, exchanged, plan)
        path = direct[0].path.rpartition("/")[0] if direct else layer.name
        variables = list(zip([v.name for v in direct], shardings))
        found.append(Row(path, how, variables, exchanged, reason))
    return found


def layout_of(sharding: Sharding) -> str:
    """`"replicated"`, or the axis of each dim."""
    if not sharding.is_sharded:
        return "replicated"
    axes = ", ".join(map(str, sharding.axes))
    return f"({axes}{',' * (len(sharding.axes) == 1)})"


def _how(call, shardings):
    sharded = any(sharding.is_sharded for sharding in shardings)
    if call is None or not (sharded or call.rule):
        return "replicated", (), None
    rule = call.rule
    missing = sum(s.num_bytes - s.local_bytes for s in shardings)
    gathers = (f"all-gather of weights, {readable_bytes(missing)}",)
    if rule is None:
        return "gathered", gathers, None
    if call.runs_nested and not call.runs_by_rule:
        return "gathered", gathers, _NESTED
    how, reason = _kind(rule), None
    if rule.stays_sharded:
        how += "\noutput sharded"
    elif "all-gather of the output" in rule.collectives:
        how += "\noutput gathered"
        reason = call.reason
        if reason is None:
            reason = (
                rule.why_whole() or "it has not been called in this model"
                if call.is_decided
                else analysis.NOT_SEEN
            )
    return how, rule.collectives, reason


_NESTED = (
    "a branch, a loop or a function of another layer calls it, where ranks "
    "cannot meet; loops of Python are unrolled"
)


def _kind(rule):
    if rule.propagates:
        return "local"
    if isinstance(rule.layer, keras.layers.Embedding):
        table = layers.weight_of(rule.layer, "embeddings")
        by_rows = sharding_of(table).model_dim == 0
        return "vocabulary-parallel" if by_rows else "column-parallel"
    return "row-parallel" if rule.source_dim is None else "column-parallel"


# The collectives of sequence parallelism that replace an all-reduce.
_OF_SUM = (
    "reduce-scatter of the output",
    "all-gather of the output's gradient",
)
_OF_INPUT = (
    "all-gather of the input, once for all layers that take it",
    "reduce-scatter of the input's gradient, once",
)
_OF_CONVERSION = {
    ("in", "scatter"): "all-gather of the input's gradient",
    ("in", "gather"): "all-gather of the input",
    ("out", "scatter"): "all-gather of the output's gradient",
    ("out", "gather"): "all-gather of the output",
    ("out", "all_gather"): "all-gather of the output",
}


def plan_of(model, num_ranks: int) -> sequence.SequencePlan | None:
    """The plan for the last shapes of a model, or of one inside it.

    Before the first call, the shapes are those of its inputs.
    """
    for functional in analysis.functional_models(model):
        call = sequence_model.prepare(functional, num_ranks)
        if not call.found:
            call.plan_for(attributes.inputs_structure(functional))
        plans = [plan for plan, _ in call.found.values() if plan is not None]
        if plans:
            return plans[-1]
    return None


def _exchanged_by_plan(layer, names, plan):
    boundary = id(sequence.boundary_of(layer))
    conversions = {
        (position[0], made.mode)
        for (key, position), made in plan.conversions.items()
        if key == boundary
    }
    found = list(names)
    if ("in", "all_gather") in conversions:
        _replace(found, "all-reduce of the input's gradient", _OF_INPUT)
    if id(layer) in plan.scatters:
        _replace(found, "all-reduce of the output", _OF_SUM)
    found += [
        text for key, text in _OF_CONVERSION.items() if key in conversions
    ]
    if boundary in plan.partial_gradients:
        found.append("all-reduce of the weights' gradients")
    return tuple(found)


def sequence_line(plan: sequence.SequencePlan, num_ranks: int) -> tuple:
    """Title and text of the line below a table."""
    sizes = sorted(set(plan.scatters.values()))
    sizes_here = ", ".join(f"{size // num_ranks} of {size}" for size in sizes)
    return (
        f"Along the sequence a device has {sizes_here} positions in",
        ", ".join(dict.fromkeys(plan.sharded)) or "no layer as a whole",
    )


def _replace(names, old, new):
    index = names.index(old) if old in names else len(names)
    names[index : index + 1] = new
