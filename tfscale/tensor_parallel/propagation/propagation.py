"""Finds the activations of a traced model that can stay sharded over ranks.

In Megatron-LM a column-split layer leaves its output sharded, and a row-split
one takes it so; nothing is sent in between. Here the model is any graph, and
each operation between the two is checked:

    column-split        Reshape  Transpose  BatchMatMul  ...        row-split
    source (b, t, 8*) -> (b, t, 4*, 2) -> ... -> (b, t, 4*, 2) -> sink (dim 2)

A tensor is whole, the same on all ranks, or sharded along one dim (*). An
operation may take a sharded tensor if each rank's shard gives the rank's shard
of the whole result. Otherwise the sources of its input are gathered and the
analysis starts again, because tensors joined with them may change. A type of
operation without a rule fails: to gather is always right.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism" (2019), section 3.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfscale.graphs import random_operations
from tfscale.graphs import walks
from tfscale.tensor_parallel.propagation.graph_facts import GraphFacts
from tfscale.tensor_parallel.propagation.labels import Sharded
from tfscale.tensor_parallel.propagation.layer_calls import Trace
from tfscale.tensor_parallel.propagation.propagation_walk import Walk


@dataclasses.dataclass(frozen=True)
class Propagation:
    """The activations that can stay sharded.

    Attributes:
        sharded: Keys of the calls whose sources stay sharded.
        gathered: For each other call with sources, why they are gathered.
        sink_sharded: Keys of the calls whose sinks arrive sharded.
        states: By name of a tensor that differs between ranks: how it does, and
            the keys of the sources before it.
        sharded_generators: Names of those generators of random numbers that
            draw for sharded tensors.
    """

    sharded: frozenset
    gathered: dict
    sink_sharded: frozenset
    states: dict
    sharded_generators: frozenset = frozenset()

    def dim(self, tensor: tf.Tensor) -> int | None:
        """The dim along which a tensor is sharded, None if it is whole."""
        state, _ = self.states.get(tensor.name, (None, None))
        return state.dim if isinstance(state, Sharded) else None


def propagate(
    trace: Trace,
    *,
    num_ranks: int,
    differentiable: Iterable[tf.Tensor] = (),
    generators: Iterable[tf.Tensor] | None = None,
    retraced: bool = False,
) -> Propagation:
    """Decides which sources of a model, traced on one device, stay sharded.

    Args:
        trace: The model, with an unknown batch size.
        num_ranks: Number of model ranks, at least 2.
        differentiable: Parameters and inputs whose gradients are needed. A
            tensor made from these and used with a shard would get a part of
            its gradient on each rank.
        generators: States of the generators of random numbers whose seeds can
            differ between ranks; None if those of all can.
        retraced: Whether ranks trace the model's Python with their shards.
            Constants in a shape that equal the full size of a sharded dim then
            count as read from the tensor, which `retrace.differing_sources` has
            to confirm.
    """
    facts = GraphFacts(
        trace, differentiable, num_ranks=num_ranks, retraced=retraced
    )
    gathered: dict[Hashable, Any] = {}
    drawing: frozenset[str] = frozenset()

    inside = {index for call in trace.calls for index in call.operations}
    between = [op for i, op in enumerate(trace.operations) if i not in inside]

    def check_generators(walk):
        nonlocal drawing
        if generators is not None:
            drawing, failures = sharded_generators(
                between, walk.states, generators
            )
            for key, reason in failures.items():
                walk.gather([key], reason)

    walk = search(trace, facts, gathered, check_generators)
    return Propagation(
        sharded=frozenset(c.key for c in trace.calls if c.sources)
        - set(gathered),
        gathered=gathered,
        sink_sharded=frozenset(walk.sharded_sinks),
        states=walk.states,
        sharded_generators=drawing,
    )


def search(
    trace: Trace,
    facts: GraphFacts,
    choices: dict[Hashable, Any],
    check: Callable[[Walk], None],
) -> Walk:
    """Runs passes over a model until no edge needs another choice.

    It ends because no choice is taken back. `choices` (see `Walk`) is changed;
    `check` is called with a pass that asks for nothing, and may add to its
    `changes`.
    """
    operations = trace.operations
    while True:
        walk = Walk(facts, choices)
        walk.run(operations, trace.calls)
        for tensor in trace.outputs:
            walk.check_output(tensor)
        if not walk.changes:
            check(walk)
        if not walk.changes:
            return walk
        choices.update(walk.changes)


def sharded_generators(
    operations: Iterable[tf.Operation],
    states: Mapping,
    generators: Iterable[tf.Tensor],
) -> tuple[frozenset, dict]:
    """Names of the generators that draw for shards only.

    Their seeds differ between ranks. A generator that draws for shards and for
    whole tensors, a constant seed, and a generator outside of the model have to
    draw for whole tensors: the second result says why, by key of the source
    that has to be gathered.
    """
    known = {tensor.name for tensor in generators}
    draws, whole_origins = {}, set()
    for op in operations:
        if op.type not in random_operations.ELEMENTWISE or len(op.inputs) == 1:
            # Operations with a state differ between ranks anyway.
            continue
        before = walks.ancestors([x.op for x in list(op.inputs)[1:]])
        origins = {x.outputs[0].name for x in before if x.type == "Placeholder"}
        state, keys = states.get(op.outputs[0].name, (None, frozenset()))
        if isinstance(state, Sharded):
            draws[op.name] = origins, keys
        else:
            whole_origins |= origins
    failures = {}
    for name, (origins, keys) in draws.items():
        reason = None
        if not origins or not origins <= known:
            reason = f"{name!r} draws with a seed that is not of a generator"
        elif origins & whole_origins:
            reason = f"the generator of {name!r} draws for a whole tensor too"
        if reason:
            failures.update(dict.fromkeys(keys, reason))
    found = (origins for origins, _ in draws.values())
    return frozenset().union(*found), failures
