"""Finds what of a model can be sharded along the sequence.

The model is traced whole, with the shapes that it is called with. All sums over
ranks that have a sequence are left sharded; then passes over the graph say what
has to be gathered again, and where, until everything fits. At last the
model is traced as a rank would, to see that it does the same (retrace.py).
"""

import concurrent.futures
import dataclasses

import keras
import tensorflow as tf

from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import generator_rules
from tfscale.tensor_parallel.propagation import graph_facts
from tfscale.tensor_parallel.propagation import layer_calls
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.placements import Sharded
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel import sequence_choices
from tfscale.tensor_parallel.sequence_parallel import sequence_planning
from tfscale.tensor_parallel.sequence_parallel import sequence_walk
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import Recorder
from tfscale.tensor_parallel.sequence_parallel.sequence_trace import (
    SequenceTrace,
)

# Each pass decides something for good; a model of hundreds of layers that are
# all alike needs no more passes than one of two.
_PASSES = 100
_NOTHING = "no activation between its layers can be sharded"


def find_plan(model, inputs, num_ranks: int) -> tuple:
    """What is sharded along the sequence for inputs of some shapes.

    Args:
        model: A functional or sequential model, analysed by `analysis.analyse`
            and with crossings (`sequence_model.prepare`).
        inputs: Its inputs, of which shapes and types matter.
        num_ranks: Number of model ranks.

    Returns:
        A `SequencePlan`, or None if nothing is sharded, and if so, why.
    """
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), inputs
    )
    # As in `analysis.analyse`: with nothing of what surrounds the call.
    with (
        layer_losses.kept(),
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        return executor.submit(_Search(model, specs, num_ranks).run).result()


class _Search:
    def __init__(self, model, specs, num_ranks):
        self._model = model
        self._specs = specs
        self._num_ranks = num_ranks

    def run(self):
        whole, recorder = self._trace(None)
        keys, shapes = [], []
        for key, call in enumerate(whole.calls):
            if not call.scatters or not isinstance(call.outputs, tf.Tensor):
                continue
            if call.outputs.shape.rank == 3:
                shapes.append(call.outputs.shape[1])
                if shapes[-1] and shapes[-1] % self._num_ranks == 0:
                    keys.append(key)
        if not keys:
            return None, _why_none(shapes, self._num_ranks)
        calls = [
            self._layer_call(key, call, key in keys)
            for key, call in enumerate(whole.calls)
        ]
        trace = SequenceTrace(
            layer_calls.Trace(whole.graph, calls, whole.outputs),
            recorder,
            {tensor.name for tensor in whole.differentiable},
            {k for k, c in enumerate(whole.calls) if c.rule.shares_input},
        )
        operations = trace.trace.operations
        layer_calls.check_calls(trace.trace, self._num_ranks)
        facts = graph_facts.GraphFacts(
            num_ranks=self._num_ranks,
            retraced=True,
            needs_gradient=graph_facts.needs_gradient(
                operations, whole.differentiable
            ),
            insides=graph_facts.insides(operations, calls),
        )
        choices = sequence_choices.Choices()
        for point in recorder.points:
            if point.crossing.of_shapes and point.place[0] == "in":
                choices.modes[point.name] = "all_gather"
        for _ in range(_PASSES):
            walk = sequence_walk.SequenceWalk(
                facts, trace, choices, frozenset(keys)
            )
            walk.run(operations, calls)
            for tensor in whole.outputs:
                walk.leave(tensor, None)
            if not walk.changes:
                self._leave_whole(walk, calls, keys, choices)
            if not walk.changes:
                plan = self._check(walk, trace, whole, calls, keys, choices)
            for change in walk.changes:
                change(choices)
            if choices.infeasible:
                return None, choices.infeasible
            if not walk.changes:
                return (plan, None) if plan.scatters else (None, _NOTHING)
        return None, "no way was found in which everything fits"

    def _layer_call(self, key, call, divides):
        rule = call.rule
        # Whether it keeps its output sharded is decided.
        reason = rule.layer.sharded_call.reason
        made = model_trace.layer_call(
            key,
            call,
            rule.stays_sharded or (rule.propagates and reason is None),
        )
        if not divides:
            return made
        return dataclasses.replace(
            made, sources=(Source(call.outputs, 1),), outputs=()
        )

    def _trace(self, plan):
        recorder = Recorder(plan, 1 if plan is None else self._num_ranks)
        with sequence.recorded_by(recorder), sequence.following(plan):
            traced = model_trace.trace_model(
                self._model,
                1 if plan is None else self._num_ranks,
                self._specs,
            )
        # Losses are whole, and each rank computes all of them.
        outputs = [*traced.outputs, *traced.losses]
        return dataclasses.replace(traced, outputs=outputs), recorder

    def _leave_whole(self, walk, calls, keys, choices):
        """Sums that would be gathered at once are not sharded."""
        outputs = {
            calls[key].sources[0].tensor.name: key
            for key in keys
            if key not in choices.replicated
        }
        for point in walk.effective:
            key = outputs.get(point.before.name)
            if key is not None:
                walk.changes.append(sequence_choices.set_replicated(key))

    def _check(self, walk, trace, whole, calls, keys, choices):
        """The plan, if a rank does what was looked at."""
        drawing, failures = generator_rules.sharded_generators(
            trace.trace.operations,
            walk.states,
            whole.generators.values(),
        )
        if failures:
            for place, op in enumerate(trace.trace.operations):
                if _draws_part(op, walk):
                    walk.take_whole(place)
            reason = next(iter(failures.values()))
            if not walk.changes:
                walk.changes.append(sequence_choices.set_infeasible(reason))
            return None
        plan, clash = sequence_planning.make_plan(
            walk,
            trace,
            whole.calls,
            choices,
            set(keys) - choices.replicated,
            {
                state
                for state, tensor in whole.generators.items()
                if tensor.name in drawing
            },
        )
        if clash:
            walk.changes.append(sequence_choices.set_infeasible(clash))
            return None
        local, recorder = self._trace(plan)
        pairs = (
            _with_points(calls, walk.effective.items(), choices.modes),
            _with_points(
                self._local_calls(local, keys, choices),
                [
                    (p, plan.conversions[id(p.crossing), p.place].dim)
                    for p in recorder.points
                    if p.mode
                ],
                {p.name: p.mode for p in recorder.points},
            ),
        )
        found = retrace.places(
            layer_calls.Trace(whole.graph, pairs[0], whole.outputs),
            layer_calls.Trace(local.graph, pairs[1], local.outputs),
            walk.states,
            self._num_ranks,
        )
        if found:
            walk.take_whole(min(found))
        return plan

    def _local_calls(self, local, keys, choices):
        return [
            self._layer_call(key, call, key in keys)
            for key, call in enumerate(local.calls)
        ]


def _with_points(calls, points, modes):
    made = []
    for number, (point, dim) in enumerate(
        sorted(points, key=lambda pair: pair[0].operations.start)
    ):
        mode = modes[point.name]
        mode = "scatter" if isinstance(mode, Sharded) else mode
        made.append(point.as_call(("point", number), mode, dim))
    return [*calls, *made]


def _draws_part(op, walk):
    return op.type.startswith("Stateless") and any(
        walk.is_along_sequence(tensor) for tensor in op.outputs
    )


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
