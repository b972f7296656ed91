"""Finds what of a model can be sharded along the sequence.

The model is traced whole, with the shapes that it is called with, and searched
like that of analysis.py, from other sources: all sums over ranks that have a
sequence are left sharded, and are gathered again where tensors enter or leave a
layer. At last the model is traced as a rank would, to compare (retrace.py).
"""

import concurrent.futures
import dataclasses
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.propagation.graph_facts import Boundaries
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.placements import Infeasible
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.propagation.propagation_walk import Walk
from tfscale.tensor_parallel.sequence_parallel import sequence

_NOTHING = "no activation between its layers can be sharded"
_GATHERED_AT_ONCE = "it would be gathered at once"


def find_plan(model, inputs, num_ranks: int) -> tuple:
    """A plan for inputs of some shapes, or None and the reason.

    The model has been analysed by `analysis.analyse` and has boundaries.
    """
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), inputs
    )

    def find():
        try:
            plan = _Search(model, specs, num_ranks).run()
        except Infeasible as error:
            return None, str(error)
        return (plan, None) if plan.scatters else (None, _NOTHING)

    # As in `analysis.analyse`: with nothing of what surrounds the call.
    with (
        layer_losses.kept(),
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        return executor.submit(find).result()


class _Search:
    def __init__(self, model, specs, num_ranks):
        self._model = model
        self._specs = specs
        self._num_ranks = num_ranks
        self._whole = self._trace(None)
        self._sums = self._find_sums()
        self._calls = self._layer_calls(self._whole)
        self._choices = {
            edge: "all_gather"
            for edge in self._whole.recorder.edges
            if edge.boundary.of_shapes and edge.place[0] == "in"
        }

    def run(self) -> sequence.SequencePlan:
        """The plan; raises `Infeasible` if there is none."""
        whole, records = self._whole, self._whole.recorder
        trace = layer_calls.Trace(whole.graph, self._calls, whole.outputs)
        self._operations = trace.operations
        facts = graph_facts.facts_of(
            trace,
            whole.differentiable,
            num_ranks=self._num_ranks,
            retraced=True,
            boundaries=Boundaries(
                self._operations,
                records.edges,
                records.spans,
                frozenset(x.name for x in whole.differentiable),
            ),
            decided=frozenset(range(len(self._calls))) - self._sums,
        )
        self._facts = facts
        propagation.search(trace, facts, self._choices, self._check)
        return self._plan

    def _find_sums(self):
        """Keys of the calls that can leave a sum sharded along dim 1."""
        shapes = {
            key: call.outputs.shape
            for key, call in enumerate(self._whole.calls)
            if call.scatters and isinstance(call.outputs, tf.Tensor)
        }
        sizes = {k: s[1] for k, s in shapes.items() if s.rank == 3}
        sums = {
            key
            for key, size in sizes.items()
            if size and size % self._num_ranks == 0
        }
        if not sums:
            raise Infeasible(_why_none(sizes.values(), self._num_ranks))
        return frozenset(sums)

    def _trace(self, plan):
        with sequence.following(plan):
            traced = model_trace.trace_model(
                self._model,
                1 if plan is None else self._num_ranks,
                self._specs,
                has_edges=True,
            )
        # Losses are whole, and each rank computes all of them.
        outputs = [*traced.outputs, *traced.losses]
        return dataclasses.replace(traced, outputs=outputs)

    def _layer_calls(self, traced):
        return [
            self._layer_call(key, call) for key, call in enumerate(traced.calls)
        ]

    def _layer_call(self, key, call):
        rule = call.rule
        # Whether it keeps its output sharded is decided.
        is_kept = rule.layer.sharded_call.reason is None
        made = model_trace.layer_call(
            key, call, rule.stays_sharded or (rule.propagates and is_kept)
        )
        if key not in self._sums:
            return made
        return dataclasses.replace(
            made, sources=(Source(call.outputs, 1),), outputs=()
        )

    def _check(self, walk):
        """Makes the plan, if a rank does what was looked at."""
        self._leave_whole(walk)
        if walk.changes:
            return
        whole = self._whole
        drawing, failures = propagation.sharded_generators(
            self._operations, walk.states, whole.generators.values()
        )
        if failures:
            self._draw_whole(walk, next(iter(failures.values())))
            return
        self._plan = plan = make_plan(
            walk,
            self._facts,
            whole.calls,
            self._choices,
            self._sums - set(self._choices),
            {
                state
                for state, tensor in whole.generators.items()
                if tensor.name in drawing
            },
        )
        local = self._trace(plan)
        edges = [edge for edge in local.recorder.edges if edge.mode]
        dims = [plan.conversions[id(e.boundary), e.place].dim for e in edges]
        traces = (
            (whole, self._calls, walk.converted.items()),
            (local, self._layer_calls(local), zip(edges, dims)),
        )
        found = retrace.places(
            *(
                layer_calls.Trace(
                    traced.graph,
                    [*calls, *self._conversions(converted)],
                    traced.outputs,
                )
                for traced, calls, converted in traces
            ),
            walk.states,
            self._num_ranks,
        )
        if found:
            self._take_whole(walk, min(found))

    def _leave_whole(self, walk):
        """Sums that would be gathered at once are not sharded."""
        sums = {
            self._calls[key].sources[0].tensor.name: key
            for key in self._sums - set(self._choices)
        }
        for edge in walk.converted:
            if edge.before.name in sums:
                walk.gather([sums[edge.before.name]], _GATHERED_AT_ONCE)

    def _draw_whole(self, walk, reason):
        drawn = [
            walk.states[op.outputs[0].name][1]
            for op in self._operations
            if op.type.startswith("Stateless")
            and walk.is_undecided(op.outputs[0])
        ]
        walk.gather(frozenset().union(*drawn), reason)

    def _conversions(self, converted):
        made = sorted(converted, key=lambda pair: pair[0].operations.start)
        for number, (edge, dim) in enumerate(made):
            mode = edge.mode or mode_of(self._choices[edge])
            yield edge.as_call(("edge", number), mode, dim)

    def _take_whole(self, walk, place):
        """Asks the layer around an operation to take what it gets whole."""
        # What is behind the first difference may be different because of it.
        op = self._operations[min(place, len(self._operations) - 1)]
        for span in self._facts.boundaries.around(op):
            edges = [
                edge
                for edge in self._facts.boundaries.inputs_of(span)
                if walk.is_undecided(edge.after)
            ]
            if edges:
                walk.changes.update(dict.fromkeys(edges, "all_gather"))
                return
        edges = [walk.states.get(x.name, (None, ()))[1] for x in op.inputs]
        walk.gather(frozenset().union(*edges), f"{op.name!r} differs on ranks")
        if not walk.changes:
            raise Infeasible(f"{op.name!r} differs on ranks")


def _why_none(sizes, num_ranks):
    known = sorted({size for size in sizes if size})
    if not sizes:
        return "no layer adds up over the ranks what has a sequence"
    if not known:
        return "the length of a sequence is not known"
    size = known[0]
    return (
        f"a sequence of {size} cannot be sharded over {num_ranks} ranks. Use "
        f"{size - size % num_ranks or num_ranks} or {size + -size % num_ranks}"
    )


def make_plan(
    walk: Walk,
    facts: GraphFacts,
    recorded: list,
    choices: Mapping[Any, Any],
    keys: Collection[int],
    drawing: Collection[int],
) -> sequence.SequencePlan:
    """The plan, of a pass that asks for nothing.

    Args:
        walk: The pass.
        facts: What is known of the model.
        recorded: The `RecordedCall`s of its layers.
        choices: What the pass was made with.
        keys: Indices in `recorded` of the calls whose sums are sharded.
        drawing: Ids of the states of the generators that draw for shards.

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
