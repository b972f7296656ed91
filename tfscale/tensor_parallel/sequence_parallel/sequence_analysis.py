"""Finds the activations of a model that can be sharded along the sequence.

The model is traced whole, with the shapes that it is called with, and searched
like that of analysis.py, from other sources: all sums over ranks that have a
sequence are left sharded, and are gathered again where tensors enter or leave a
layer. At last the model is traced as a rank would, to compare (retrace.py).
"""

import dataclasses

import keras
import tensorflow as tf

from tfscale.context import step_context
from tfscale.graphs.noting_scope import outside_scopes
from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.propagation.labels import Infeasible
from tfscale.tensor_parallel.propagation.labels import Sharded
from tfscale.tensor_parallel.sequence_parallel import sequence


def find_plan(
    model, inputs, num_ranks: int, is_inner: bool, training: bool
) -> tuple:
    """A plan for inputs of some shapes, or None and the reason.

    The model has been analyzed by `analysis.analyze` and has boundaries; see
    `analysis.ShardingDecision` for `is_inner`.
    """
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), inputs
    )

    def find():
        try:
            search = _Search(model, specs, num_ranks, is_inner, training)
            return search.run(), None
        except Infeasible as error:
            return None, str(error)

    with layer_losses.kept():
        return outside_scopes(find)


class _Search:
    def __init__(self, model, specs, num_ranks, is_inner, training):
        self._model = model
        self._specs = specs
        self._num_ranks = num_ranks
        self._is_inner = is_inner
        self._training = training
        self._whole = self._trace(None)
        self._sums = self._find_sums()
        self._choices = {
            edge: "all_gather"
            for edge in self._whole.recorder.edges
            if edge.boundary.of_shapes and edge.position[0] == "in"
        }

    def run(self) -> sequence.SequencePlan:
        """Raises `Infeasible` if there is no plan."""
        whole, records = self._whole, self._whole.recorder
        trace = self._as_trace(whole)
        self._operations = trace.operations
        self._facts = graph_facts.GraphFacts(
            trace,
            whole.differentiable,
            num_ranks=self._num_ranks,
            retraced=True,
            inputs=whole.inputs if self._is_inner else (),
            edges=records.edges,
            spans=records.spans,
            fixed=frozenset(range(len(trace.calls))) - self._sums,
        )
        propagation.search(trace, self._facts, self._choices, self._check)
        if not self._plan.scatters:
            raise Infeasible("no activation between its layers can be sharded")
        return self._plan

    def _trace(self, plan):
        with step_context.within_ranks(sequence_plan=plan):
            return model_trace.trace_model(
                self._model,
                1 if plan is None else self._num_ranks,
                self._specs,
                modes=(self._training,),
            )

    def _find_sums(self):
        """Keys of the calls that can leave a sum sharded along dim 1."""
        sizes = {
            key: call.outputs.shape[1]
            for key, call in enumerate(self._whole.calls)
            if call.scatters
            and isinstance(call.outputs, tf.Tensor)
            and call.outputs.shape.rank == 3
        }
        ranks = self._num_ranks
        sums = {k for k, size in sizes.items() if size and size % ranks == 0}
        if not sums:
            raise Infeasible(_why_none(sizes.values(), ranks))
        return frozenset(sums)

    def _as_trace(self, traced, converted=()):
        """For propagation; with conversions, to compare it with another one."""
        calls = [
            self._layer_call(key, call) for key, call in enumerate(traced.calls)
        ]
        made = sorted(converted, key=lambda pair: pair[0].operations.start)
        for number, (edge, dim) in enumerate(made):
            mode = edge.mode or _mode_of(self._choices[edge])
            calls.append(edge.as_call(("edge", number), mode, dim))
        return layer_calls.Trace(traced.graph, calls, traced.outputs)

    def _layer_call(self, key, call):
        rule = call.rule
        # Whether its output stays sharded is decided already.
        is_kept = rule.layer.sharded_call.reason is None
        made = model_trace.layer_call(
            key, call, rule.stays_sharded or (rule.propagates and is_kept)
        )
        if key not in self._sums:
            return made
        source = layer_calls.Source(call.outputs, 1)
        return dataclasses.replace(made, sources=(source,), outputs=())

    def _check(self, walk):
        """Creates the plan, if a rank's trace agrees with the whole one."""
        whole = self._whole
        kept = self._sums - set(self._choices)
        sums = {whole.calls[key].outputs.name: key for key in kept}
        for edge in walk.converted:
            if edge.before.name in sums:
                key = sums[edge.before.name]
                walk.gather([key], "it would be gathered at once")
        if walk.changes:
            return
        drawing, failures = propagation.sharded_generators(
            self._operations, walk.states, whole.generators.values()
        )
        if failures:
            self._draw_whole(walk, next(iter(failures.values())))
            return
        self._plan = plan = self._make_plan(walk, kept, drawing)
        local = self._trace(plan)
        converted = [
            (edge, plan.conversions[id(edge.boundary), edge.position].dim)
            for edge in local.recorder.edges
            if edge.mode
        ]
        found = retrace.different_operations(
            self._as_trace(whole, walk.converted.items()),
            self._as_trace(local, converted),
            walk.states,
            self._num_ranks,
        )
        if found:
            self._gather_inputs(walk, min(found))

    def _make_plan(self, walk, keys, drawing):
        """The plan of a pass without changes.

        `keys` are of the calls whose sums are sharded. A call that the plan
        treats otherwise than the pass did is found in a rank's trace.
        """
        choices, recorded = self._choices, self._whole.calls
        edges = self._facts.edges.values()
        scatters = {}
        conversions = {}
        for key in keys:
            layer = recorded[key].rule.sum_layer
            size = recorded[key].outputs.shape[1]
            if scatters.setdefault(id(layer), size) != size:
                raise Infeasible(
                    f"{layer.name!r} is called with several lengths"
                )
        for edge, dim in walk.converted.items():
            made = sequence.Conversion(
                _mode_of(choices[edge]), dim, edge.before.shape[dim]
            )
            key = id(edge.boundary), edge.position
            if conversions.setdefault(key, made) != made:
                raise Infeasible(
                    f"{edge.boundary.layer.name!r} is called in two ways"
                )
        partial = {b for b, choice in choices.items() if choice == "partial"}
        if not partial <= {e.boundary for e in edges if e.position[0] == "in"}:
            raise Infeasible("a layer without inputs has weights")
        return sequence.SequencePlan(
            scatters,
            conversions,
            frozenset(map(id, partial)),
            self._whole.generators_named(drawing),
            _sharded_layers(walk, edges),
        )

    def _draw_whole(self, walk, reason):
        drawn = [
            walk.states[op.outputs[0].name][1]
            for op in self._operations
            if op.type.startswith("Stateless")
            and walk.may_be_gathered(op.outputs[0])
        ]
        walk.gather(frozenset().union(*drawn), reason)

    def _gather_inputs(self, walk, index):
        """Asks the layer around an operation for whole inputs."""
        # Later differences may follow from the first one.
        op = self._operations[min(index, len(self._operations) - 1)]
        for span in graph_facts.outwards(self._facts.span_of(op)):
            edges = [
                edge
                for edge in self._facts.inputs_of(span)
                if walk.may_be_gathered(edge.after)
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


def _mode_of(choice):
    return "scatter" if isinstance(choice, Sharded) else choice


def _sharded_layers(walk, edges):
    takes, returns = {}, {}
    for edge in edges:
        if walk.may_be_gathered(edge.after):
            found = returns if edge.position[0] == "out" else takes
            found[id(edge.boundary)] = edge.boundary.layer.name
    return tuple(name for key, name in takes.items() if key in returns)
