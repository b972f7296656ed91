"""Makes a plan of what was chosen for each call, if all calls agree."""

from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.placements import Infeasible
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.propagation.propagation_walk import Walk
from tfscale.tensor_parallel.sequence_parallel import sequence


def make_plan(
    walk: Walk,
    facts: GraphFacts,
    recorded: list,
    choices: Mapping[Any, Any],
    keys: Collection[int],
    drawing: Collection[int],
) -> sequence.SequencePlan:
    """The plan.

    Args:
        walk: A pass that asks for nothing.
        facts: What is known of the model.
        recorded: The `RecordedCall`s of its layers.
        choices: What the pass was made with.
        keys: Places in `recorded` of the calls whose sums are sharded.
        drawing: Ids of the states of the generators that draw for parts.

    Raises:
        Infeasible: If it does not hold for all calls of a layer.
    """
    edges = facts.boundaries.edges.values()
    scatters: dict[int, int] = {}
    conversions: dict[tuple, sequence.Conversion] = {}
    for key in keys:
        layer = recorded[key].rule.sum_layer
        size = recorded[key].outputs.shape[1]
        if scatters.setdefault(id(layer), size) != size:
            raise Infeasible(f"{layer.name!r} is called with several lengths")
    for key, call in enumerate(recorded):
        layer = call.rule.sum_layer
        is_sum = id(layer) in scatters and call.scatters is not None
        if is_sum and key not in keys:
            raise _called_in_two_ways(layer)
    for edge, dim in walk.converted.items():
        made = sequence.Conversion(
            mode_of(choices[edge]), dim, edge.before.shape[dim]
        )
        taken_at = id(edge.boundary), edge.place
        if conversions.setdefault(taken_at, made) != made:
            raise _called_in_two_ways(edge.boundary.layer)
    for edge in edges:
        taken = conversions.get((id(edge.boundary), edge.place))
        if taken and edge not in walk.converted:
            size = edge.before.shape[taken.dim]
            if walk.is_undecided(edge.before):
                size //= facts.num_ranks
            parts = 1 if taken.mode == "scatter" else facts.num_ranks
            if size == taken.size // parts:
                raise _called_in_two_ways(edge.boundary.layer)
    partial = {b for b, choice in choices.items() if choice == "partial"}
    if not partial <= {e.boundary for e in edges if e.place[0] == "in"}:
        raise Infeasible("a layer without inputs has weights")
    return sequence.SequencePlan(
        scatters,
        conversions,
        frozenset(map(id, partial)),
        frozenset(drawing),
        _sharded_layers(walk, edges),
    )


def mode_of(choice: str | Sharded) -> str:
    """The mode of a `Conversion` for what is chosen at an edge."""
    return "scatter" if isinstance(choice, Sharded) else choice


def _called_in_two_ways(layer):
    return Infeasible(f"{layer.name!r} is called in two ways")


def _sharded_layers(walk, edges):
    """Names of the layers that take parts and give parts."""
    taken, given = {}, set()
    for edge in edges:
        if walk.is_undecided(edge.after):
            if edge.place[0] == "out":
                given.add(id(edge.boundary))
            else:
                taken[id(edge.boundary)] = edge.boundary.layer.name
    return tuple(name for key, name in taken.items() if key in given)
