"""What a summary says of activations that are sharded along the sequence."""

import keras

from tfscale import _internals
from tfscale.tensor_parallel.sequence_parallel import boundary_layer
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel import sequence_model

# What an exchange becomes, and where the other part of it is.
_OF_SUM = (
    "reduce-scatter of the output",
    "all-gather of the output's gradient",
)
_OF_INPUT = (
    "all-gather of the input, once for all layers that take it",
    "reduce-scatter of the input's gradient, likewise",
)
_OF_CONVERSION = {
    ("in", "scatter"): "all-gather of the input's gradient",
    ("in", "gather"): "all-gather of the input",
    ("out", "scatter"): "all-gather of the output's gradient",
    ("out", "gather"): "all-gather of the output",
    ("out", "all_gather"): "all-gather of the output",
}


def plan_of(model, num_ranks: int) -> sequence.SequencePlan | None:
    """The plan of the last shapes that a model was called with.

    Args:
        model: A model, or what has one among its layers. If it was not called
            yet, its own inputs have the shapes.
        num_ranks: Number of model ranks.
    """
    if not isinstance(model, _internals.Functional | keras.Sequential):
        for layer in _internals.sublayers(model):
            plan = plan_of(layer, num_ranks)
            if plan is not None:
                return plan
        return None
    call = sequence_model.prepare(model, num_ranks)
    if not call.found:
        call.plan_for(_internals.inputs_structure(model))
    plans = [plan for plan, _ in call.found.values() if plan is not None]
    return plans[-1] if plans else None


def exchanged(
    layer: keras.layers.Layer,
    names: tuple[str, ...],
    plan: sequence.SequencePlan,
) -> tuple[str, ...]:
    """What ranks exchange for a layer that runs by a plan.

    Args:
        layer: The layer.
        names: What they would exchange without it.
        plan: The plan.
    """
    found = list(names)
    conversions = {
        (place[0], made.mode)
        for (boundary, place), made in plan.conversions.items()
        if boundary == id(boundary_layer.boundary_of(layer))
    }
    if ("in", "all_gather") in conversions:
        _replace(found, "all-reduce of the input's gradient", _OF_INPUT)
    if id(layer) in plan.scatters:
        _replace(found, "all-reduce of the output", _OF_SUM)
    found += [
        text for key, text in _OF_CONVERSION.items() if key in conversions
    ]
    if id(boundary_layer.boundary_of(layer)) in plan.partial_gradients:
        found.append("all-reduce of the weights' gradients")
    return tuple(found)


def line(plan: sequence.SequencePlan, num_ranks: int) -> tuple[str, str]:
    """Title and text of what there is to say below a table."""
    sizes = sorted(set(plan.scatters.values()))
    parts = ", ".join(f"{size // num_ranks} of {size}" for size in sizes)
    return (
        f"Along the sequence a device has {parts} positions in",
        ", ".join(dict.fromkeys(plan.sharded)) or "no layer as a whole",
    )


def _replace(names, old, new):
    place = names.index(old) if old in names else len(names)
    names[place : place + 1] = new
