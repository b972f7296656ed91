"""Makes a plan of what was decided for each call, if all calls agree."""

from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import (
    SequenceTrace,
)
from tfscale.tensor_parallel.sequence_parallel.sequence_walk import SequenceWalk


def make_plan(
    walk: SequenceWalk, trace: SequenceTrace, recorded, choices, keys, drawing
) -> tuple[sequence.SequencePlan | None, str | None]:
    """The plan, or why it does not hold for all calls of a layer.

    Args:
        walk: A pass that found nothing to change.
        trace: The model.
        recorded: The `sharded_call.Recorded` of its calls.
        choices: What the pass was made with.
        keys: Places in `recorded` of the calls whose sums are sharded.
        drawing: Ids of the states of the generators that draw for parts.
    """
    num_ranks = walk.num_ranks
    scatters, conversions, partial_gradients = {}, {}, set()
    for key in keys:
        layer = recorded[key].rule.sum_layer
        size = recorded[key].outputs.shape[1]
        if scatters.setdefault(id(layer), size) != size:
            return None, f"{layer.name!r} is called with several lengths"
    for key, call in enumerate(recorded):
        layer = call.rule.sum_layer
        is_sum = id(layer) in scatters and call.scatters is not None
        if is_sum and key not in keys:
            return None, f"{layer.name!r} is called in two ways"
    for point, dim in walk.effective.items():
        mode = choices.modes[point.name]
        mode = "scatter" if isinstance(mode, Sharded) else mode
        made = sequence.Conversion(mode, dim, point.before.shape[dim])
        known = conversions.setdefault((id(point.crossing), point.place), made)
        if known != made:
            layer = point.crossing.layer
            return None, f"{layer.name!r} is called in two ways"
    copying = choices.partial_gradients
    for point in trace.points.values():
        taken = conversions.get((id(point.crossing), point.place))
        layer = point.crossing.layer
        if taken and point not in walk.effective:
            size = point.before.shape[taken.dim]
            if walk.is_along_sequence(point.before):
                size //= num_ranks
            parts = 1 if taken.mode == "scatter" else num_ranks
            if size == taken.size // parts:
                return None, f"{layer.name!r} is called in two ways"
        is_input = point.place[0] == "in"
        if id(point.crossing) in copying and is_input:
            partial_gradients.add(id(point.crossing))
    if not copying <= partial_gradients:
        return None, "a layer without inputs has weights"
    return (
        sequence.SequencePlan(
            scatters,
            conversions,
            frozenset(copying),
            frozenset(drawing),
            _sharded_layers(walk, trace),
        ),
        None,
    )


def _sharded_layers(walk, trace):
    """Names of the layers that take parts and give parts."""
    taken, given = {}, set()
    for point in trace.points.values():
        if walk.is_along_sequence(point.after):
            if point.place[0] == "out":
                given.add(id(point.crossing))
            else:
                taken[id(point.crossing)] = point.crossing.layer.name
    return tuple(name for key, name in taken.items() if key in given)
