"""Traces a stage into pure functions of parameters, state and inputs.

Forward and backward are one graph (stage_graph.py), which is split into the
phases of a schedule (phases.py). A stage whose layers are split over model
ranks is traced for all of them in one graph, in which the ranks meet. Each
phase is one function on the devices of all ranks, for each replica; its tensors
are named by their rank and their key there:

    (0, Activation(v)) ──►┌─────────┐──► (0, Activation(w))
    (1, Activation(v)) ──►│ forward │──► (1, Activation(w))
                         └─────────┘

A stage that one device runs has rank 0 only.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.context import step_context
from tfscale.graphs import xla_clusters
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing import phases
from tfscale.pipeline.tracing.phases import Phase
from tfscale.pipeline.tracing.stage_graph import StageGraph
from tfscale.pipeline.tracing.stage_graph import TraceOptions
from tfscale.pipeline.tracing.stage_losses import Targets
from tfscale.step import losses
from tfscale.tensor_parallel.sequence_parallel import sequence


@dataclasses.dataclass(frozen=True)
class TracedStage:
    """The functions of one stage.

    Attributes:
        joint: For each replica, or once for all, what the model ranks run
            together: phases by the letter of the action, `"F"`, `"B"`, `"W"`,
            with keys `(rank, key)`.
        divisors: Of the last stage, makes `DIVISORS` of the targets;
            None if they depend on masks.
        outputs, sums: Specs of the results of the forward, and of each
            `GradientSum`.
        losses: Of the last stage, those of `compile`, or of `compute_loss`.
        gathered: Of the last stage, the outputs that model ranks return in
            shards, and the dim of these.
        batch_norms: The layers, and numbers of channels, of its `Moments`.
        keeps_added: Whether its loss has what layers add as a summand.
    """

    joint: tuple[dict[str, Phase], ...]
    divisors: Phase | None
    outputs: dict[Any, tf.TensorSpec]
    sums: dict[Any, tf.TensorSpec]
    losses: tuple[losses.CompiledLoss, ...]
    gathered: dict[Value, int]
    batch_norms: dict[
        keys.Moments, list[tuple[keras.layers.BatchNormalization, int]]
    ]
    keeps_added: bool

    @property
    def phases(self) -> dict[str, Phase]:
        """The same for a stage that one device runs, with keys alone."""
        (joint,) = self.joint
        return {
            letter: Phase(
                phase.function,
                tuple(key for _, key in phase.inputs),
                tuple(key for _, key in phase.outputs),
            )
            for letter, phase in joint.items()
        }

    def of_replica(self, replica: int) -> dict[str, Phase]:
        """The phases that the ranks of one replica run together."""
        return self.joint[replica % len(self.joint)]


def trace_stage(graph: StageGraph) -> TracedStage:
    """Traces one stage and splits it into the phases of a schedule."""
    wrapped = tf.compat.v1.wrap_function(graph.build, [])
    (stage,) = _split(wrapped, [graph])
    return stage


def trace_on_ranks(
    make_graph: Callable[[], StageGraph],
    strategy: MeshStrategy,
    devices: Sequence[Sequence[str]],
    model,
    sequence_plan: sequence.SequencePlan | None,
) -> list[TracedStage]:
    """Traces one stage for all model ranks: several in one graph without XLA.

    `make_graph` makes the graph of the stage for a rank; `devices` are
    `devices[replica][rank]`. Called outside of replicas. Returns the traced
    stage of each rank.
    """
    if len(devices[0]) == 1:
        return [trace_stage(make_graph())]
    graphs = []

    def build_rank():
        graphs.append(make_graph())
        plan = sequence_plan and sequence_plan.for_call()
        with step_context.within_ranks(sequence_plan=plan, model=model):
            graphs[-1].build()

    def build():
        # One rank after the other, between the points where they meet.
        # XLA may compile clusters of the step that calls the stage.
        with strategy.scope(), xla_clusters.with_exceptions():
            strategy.extended.call_ranks(build_rank, devices[0])

    return _split(tf.compat.v1.wrap_function(build, []), graphs, devices)


def trace_divisors(stages, numbers, inputs, targets: Targets) -> phases.Phase:
    """The forward of the whole model, less all that its masks do not need."""
    whole = dataclasses.replace(
        stages[-1],
        calls=tuple(call for stage in stages for call in stage.calls),
        inputs=tuple(key.value for key in inputs),
        variables=tuple(
            {id(v): v for stage in stages for v in stage.variables}.values()
        ),
    )
    graph = StageGraph(
        whole, numbers, inputs, set(), targets, TraceOptions(training=False)
    )
    wrapped = tf.compat.v1.wrap_function(graph.build, [])
    divisors = graph.forward[keys.DIVISORS]
    spec = phases.PhaseSpec("divisors", {keys.DIVISORS: divisors})
    return phases.split(wrapped, graph.arguments, [spec])[0]


def _split(wrapped, graphs, devices=((),)):
    """The traced stage of each rank, whose phases all ranks run together.

    The stage was traced with the devices of replica 0.
    """
    first, options = graphs[0], graphs[0].options
    rank_of = {device: rank for rank, device in enumerate(devices[0])}

    def joined(*names):
        """Tensors of all ranks, by rank and key."""
        return {
            (rank, key): tensor
            for rank, graph in enumerate(graphs)
            for name in names
            for key, tensor in getattr(graph, name).items()
        }

    def spec(name, results, **more):
        return phases.PhaseSpec(f"{first.name}_{name}", results, **more)

    forward, divisors = joined("forward"), [None] * len(graphs)
    if options.training or keys.TOTALS in first.arguments:
        for rank, graph in enumerate(graphs):
            if forward.pop((rank, keys.DIVISORS), None) is not None:
                divisors[rank] = _early_divisors(wrapped, graph)
    side_effects = [op for graph in graphs for op in graph.side_effects]
    specs = {"F": spec("forward", forward, side_effects=side_effects)}
    if options.training:
        gradients = ["input_gradients"]
        if not options.weights_apart:
            gradients.append("weight_gradients")
        again = options.recompute
        specs["B"] = spec("backward", joined(*gradients), restart=again)
        if options.weights_apart:
            specs["W"] = spec("weights", joined("weight_gradients"))
    joint = []
    for of_replica in devices:
        of_letters = phases.split(
            wrapped,
            joined("arguments"),
            list(specs.values()),
            jit_compile=options.jit_compile,
            devices=dict(zip(devices[0], of_replica)),
            key_of_saved=lambda saved, x: (rank_of.get(x.device, 0), saved),
        )
        joint.append(dict(zip(specs, of_letters)))
    return [
        TracedStage(
            joint=tuple(joint),
            divisors=of_rank,
            outputs=_specs(graph.forward),
            sums=_specs(graph.weight_gradients),
            losses=graph.losses,
            gathered=graph.gathered,
            batch_norms=graph.batch_norms,
            keeps_added=_keeps_added(wrapped, graph),
        )
        for graph, of_rank in zip(graphs, divisors)
    ]


def _early_divisors(wrapped, graph):
    """Returns a function that computes a rank's divisors from the targets.

    None if they depend on outputs. Backwards, which begin before the last
    forward ends, need them.
    """
    results = {keys.DIVISORS: graph.forward[keys.DIVISORS]}
    needed = phases.needed_arguments(list(results.values()), graph.arguments)
    if not all(isinstance(key, keys.Target) for key in needed):
        return None
    spec = phases.PhaseSpec(f"{graph.name}_divisors", results)
    jit_compile = graph.options.jit_compile
    return phases.split(
        wrapped, graph.arguments, [spec], jit_compile=jit_compile
    )[0]


def _keeps_added(wrapped, graph):
    """Whether the gradient by what layers add is 1, whatever goes in."""
    if graph.by_added is None:
        return False
    spec = phases.PhaseSpec("by_added", {"by_added": graph.by_added})
    (phase,) = phases.split(wrapped, graph.arguments, [spec])
    return not phase.inputs and float(phase.function()[0]) == 1.0


def _specs(results):
    return {
        key: tf.TensorSpec(tensor.shape, tensor.dtype)
        for key, tensor in results.items()
    }
