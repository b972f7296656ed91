"""Splits one traced function into phases that run at different times.

A stage is traced once, forward and backward together:

    params, state, inputs, targets ──► forward ──► outputs, new state, losses
                                          │
                        output gradients ─┼─► backward ──► input gradients
                                          │       │
                                          └───────┴─► weights ──► gradients

and then split where the schedule splits it. An operation belongs to the first
phase that needs it; tensors that a later phase needs are results of the
earlier one. So what a microbatch keeps between its forward and its backward is
exactly what the backward reads, and nothing is computed twice.

Each phase is optimized by Grappler once, here, so that the graph of a step, in
which it stands once per microbatch, need not be. TensorFlow inlines it there: a
function called as one node either hides which of its operations failed (a call
with `_noinline`), or misses the kernels of oneDNN and takes 1.7 times as long
(a branch of a `Case`).
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.graphs import grappler
from tfscale.graphs import walks
from tfscale.graphs.subgraph import extract
from tfscale.pipeline.tracing import keys


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a traced function.

    `function` takes tensors in the order of `inputs`, and returns a list in the
    order of `outputs`, and last a scalar that is there when all of them are.
    """

    function: tf.types.experimental.ConcreteFunction
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def run(self, tensors: Mapping[Hashable, tf.Tensor]) -> dict:
        """Runs the phase on some of `tensors`."""
        results = self.function(*[tensors[key] for key in self.inputs])
        return dict(zip(self.outputs, results))


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
    """The description of one phase.

    Attributes:
        name: Of its function: errors and profiles show it.
        results: The tensors that it has to return, by key.
        side_effects: Operations that have to run: prints, assertions.
        restart: Whether it computes again what it needs of earlier phases.
    """

    name: str
    results: Mapping[Hashable, tf.Tensor]
    side_effects: Sequence[tf.Operation] = ()
    restart: bool = False


def split(
    wrapped,
    arguments: Mapping[Hashable, tf.Tensor],
    specs: Sequence[PhaseSpec],
    *,
    jit_compile: bool = False,
    devices: Mapping[str, str] | None = None,
    key_of_saved: Callable = lambda saved, tensor: saved,
) -> list[Phase]:
    """Splits what `tf.compat.v1.wrap_function` returned into phases.

    Args:
        wrapped: The function.
        arguments: The placeholders in its graph, by key.
        specs: In the order in which the phases will run.
        jit_compile: Whether XLA compiles the phases, in place of Grappler. Not
            those of a loop, whose steps are saved in lists: XLA returns none.
        devices: See `Subgraph.run`.
        key_of_saved: Returns the key of a tensor that a phase saves for a later
            one, given a key that no other tensor has, and the tensor.
    """
    given = {tensor.ref() for tensor in arguments.values()}
    makes = [dict(spec.results) for spec in specs]
    key_of = {}
    for results in (*makes, arguments):
        key_of.update((tensor.ref(), key) for key, tensor in results.items())
    phase_of, bodies, needs = {}, [], []
    for index, spec in enumerate(specs):
        if spec.restart:
            phase_of.clear()
        roots = [tensor.op for tensor in spec.results.values()]
        operations = walks.ancestors(
            [*roots, *spec.side_effects],
            {*phase_of, *(tensor.op for tensor in arguments.values())},
            control_inputs=True,
        )
        phase_of.update(dict.fromkeys(operations, index))
        bodies.append(operations)
        needs.append(_inputs(operations, spec, phase_of, index, given))
        # A phase returns the tensors that a later phase takes.
        for tensor in needs[-1]:
            if tensor.ref() not in given:
                saved = keys.Saved(specs[0].name, tensor.name)
                saved = key_of_saved(saved, tensor)
                key = key_of.setdefault(tensor.ref(), saved)
                makes[phase_of[tensor.op]].setdefault(key, tensor)
    if any(x.dtype == tf.variant for needed in needs for x in needed):
        jit_compile = False
    phases, original = [], wrapped.graph.as_graph_def()
    for spec, body, needed, made in zip(specs, bodies, needs, makes):
        side_effects = [op for op in spec.side_effects if op in body]
        subgraph = extract(
            body, needed, list(made.values()), side_effects, original
        )
        function = _function(
            spec.name, subgraph, needed, wrapped.graph, jit_compile, devices
        )
        inputs = tuple(key_of[tensor.ref()] for tensor in needed)
        phases.append(Phase(function, inputs, tuple(made)))
    return phases


def needed_arguments(
    tensors: Sequence[tf.Tensor], arguments: Mapping[Hashable, tf.Tensor]
) -> set[Hashable]:
    """Keys of the arguments that some tensors are computed from."""
    operations = walks.ancestors(
        [tensor.op for tensor in tensors], control_inputs=True
    )
    return {key for key, x in arguments.items() if x.op in operations}


def _inputs(operations, spec, phase_of, index, given):
    """The tensors that a phase takes, in a fixed order."""
    used = {x.ref(): x for op in operations for x in op.inputs}
    used.update((x.ref(), x) for x in spec.results.values())
    needed = [
        tensor
        for ref, tensor in used.items()
        # Constants are copied into every phase, captures captured again.
        if ref in given
        or (
            tensor.op.type not in ("Const", "Placeholder")
            and phase_of[tensor.op] != index
        )
    ]
    return sorted(needed, key=lambda tensor: tensor.name)


def _function(name, subgraph, feeds, graph, jit_compile, devices):
    """The function that runs a part of `graph` on tensors for `feeds`."""
    if not jit_compile:
        subgraph = grappler.optimize(subgraph)
    outside = {inside.op.name: x for x, inside in graph.captures}

    def call(*args):
        capture = tf.compat.v1.get_default_graph().capture
        tensors = dict(zip(subgraph.feeds, args))
        for placeholder, original in subgraph.captures.items():
            tensors[placeholder] = capture(outside[original])
        results = subgraph.run(tensors, devices)
        with tf.control_dependencies(results):
            return [*results, tf.zeros((), name="done")]

    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in feeds]
    functions = subgraph.graph_def.library.function
    if jit_compile or subgraph.keep or functions:
        call.__name__ = name
        return tf.function(
            call, autograph=False, jit_compile=jit_compile or None
        ).get_concrete_function(*signature)
    # Without side effects there is nothing to put in order, and no need for the
    # identity that `tf.function` gives each result to order it by. (What
    # `wrap_function` returns cannot be in a process twice with the same loops.)
    return tf.compat.v1.wrap_function(call, signature, name)
