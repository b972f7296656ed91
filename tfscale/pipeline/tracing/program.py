"""All functions of a model, traced for each kind of batch."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.collectives import rank_collectives
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing import trace
from tfscale.pipeline.tracing.phases import Phase
from tfscale.pipeline.tracing.stage_graph import StageGraph
from tfscale.pipeline.tracing.stage_graph import TraceOptions
from tfscale.pipeline.tracing.stage_losses import Targets
from tfscale.step import losses
from tfscale.tensor_parallel.sequence_parallel import sequence_model


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions that the executor runs, of each stage.

    `divisors` makes `DIVISORS` of a microbatch before it runs; it is None if
    nothing is divided by them then.
    """

    stages: tuple[trace.TracedStage, ...]
    divisors: Phase | None


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a model: one for each kind of batch, traced once.

    Iterates over those of the first model ranks. After `dataclasses.replace`
    none is traced.
    """

    plan: PipelinePlan
    strategy: MeshStrategy
    compile_loss: Any = None
    jit_compile: bool = False
    model: keras.Model | None = None
    of_kinds: dict[str, list[Program]] = dataclasses.field(
        default_factory=dict, init=False
    )

    def __iter__(self):
        return (of_ranks[0] for of_ranks in self.of_kinds.values())

    def get(self, inputs, targets, *, training: bool) -> Program:
        """The program of this model rank for batches like this one.

        `inputs` are flat, with the rows of a whole batch; `targets` are `(y,
        sample_weight)`, with `x` where the model has its own `compute_loss`, or
        None to predict. `training` says whether there will be backwards.
        """
        specs = keras.tree.map_structure(
            lambda x: None if x is None else (tuple(x.shape), x.dtype),
            (inputs, targets),
        )
        trainable = [variable.trainable for variable in self.plan.variables]
        kind = repr((specs, training, trainable))

        def trace_kind():
            if kind not in self.of_kinds:
                self.of_kinds[kind] = self._trace(inputs, targets, training)

        if rank_collectives.num_ranks() == 1:
            trace_kind()
        else:
            # Ranks are traced by the thread that runs them. They meet also if
            # this kind is known: that of another replica may be new.
            context = tf.distribute.get_replica_context()
            context.merge_call(
                lambda _, functions: [each() for each in functions.values],
                args=(trace_kind,),
            )
        return self.of_kinds[kind][rank_collectives.rank()]

    def _trace(self, inputs, targets, training):
        plan, schedule = self.plan, self.plan.schedule
        options = TraceOptions(
            training=training,
            accumulate=schedule.microbatches_per_batch > 1,
            recompute=plan.recompute,
            weights_apart=any(a.kind == "W" for a in schedule.order()),
            jit_compile=self.jit_compile,
            has_replicas=self.strategy.extended.num_all_replicas > 1,
        )
        values = map(keys.Activation, plan.graph.inputs)
        known = dict(zip(values, map(self._spec, inputs)))
        fed = dict(known)
        if targets is not None:
            given = [x for x in keras.tree.flatten(targets) if x is not None]
            targets = Targets(
                self.compile_loss,
                targets,
                tuple(map(self._spec, given)),
                plan.graph.pack_outputs,
                self.model,
            )
        functional = plan.graph.functional
        sequence_plan = None
        call = None
        if self.strategy.extended.sequence_parallel:
            call = sequence_model.call_of(functional)
        if call is not None:
            structure = attributes.inputs_structure(functional)
            x = keras.tree.pack_sequence_as(structure, inputs)
            sequence_plan = call.plan_for(x, training)
        traced, differentiable = [], plan.graph.differentiable()
        # The functions belong to the model, not to the graph of this step.
        with tf.init_scope():
            for stage in plan.stages:
                is_last = stage.index == len(plan.stages) - 1
                make_graph = functools.partial(
                    StageGraph,
                    stage,
                    plan.numbers,
                    {
                        key: known[key]
                        for value in stage.inputs
                        for key in (keys.Activation(value), keys.Mask(value))
                        if key in known
                    },
                    differentiable,
                    targets if is_last else None,
                    options,
                )
                home = schedule.stage_devices[stage.index]
                grid = self.strategy.device_grid
                of_ranks = trace.trace_on_ranks(
                    make_graph,
                    self.strategy,
                    [of_replica[home] for of_replica in grid],
                    functional,
                    sequence_plan,
                )
                traced.append(of_ranks)
                known.update(of_ranks[0].outputs)
            rows = next(filter(None, fed.values())).shape[0]
            _check_outputs(plan, known, rows)
            stages_of_ranks = list(zip(*traced))
            stages = stages_of_ranks[0]
            last = stages[-1]
            if targets is not None:
                _check_losses(plan, stages)
                if self.model is not None and not last.keeps_added:
                    self._check_none_added(known)
            num_replicas = self.strategy.extended.num_all_replicas
            count = plan.schedule.microbatches_per_batch * num_replicas
            if training and count > 1:
                losses.warn_of_reduced(last.losses)
            divisors = None
            is_needed = training or (targets is not None and self.model)
            if is_needed and last.divisors is None and last.losses:
                divisors = trace.trace_divisors(
                    plan.stages, plan.numbers, fed, targets
                )
        return [
            Program(stages, stages[-1].divisors or divisors)
            for stages in stages_of_ranks
        ]

    def _check_none_added(self, known):
        regularized = [
            variable.path
            for variable in self.plan.variables
            if variable.regularizer is not None
        ]
        if regularized or any(isinstance(key, keys.AddedLoss) for key in known):
            raise ValueError(
                "A `compute_loss` in a pipeline must add what layers add to "
                "the loss as it is, because the pipeline does. Received: one "
                "that leaves out or scales "
                + (
                    f"the regularizer of {regularized[0]!r}"
                    if regularized
                    else "what a layer gives to `add_loss`"
                )
                + ". Add `sum(self.losses)`, as `super().compute_loss(...)` "
                "does, after everything else, or have the layers add nothing."
            )

    def _spec(self, tensor):
        if tensor is None:
            return None
        rows, count = tensor.shape[0], self.plan.schedule.microbatches_per_batch
        rows = None if rows is None or rows % count else rows // count
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)


def _check_losses(plan: PipelinePlan, stages: Sequence) -> None:
    """Refuses to train or evaluate without loss, `add_loss` or regularizer."""
    if (
        stages[-1].losses
        or any(keys.AddedLoss(i) in s.outputs for i, s in enumerate(stages))
        or any(variable.regularizer for variable in plan.variables)
    ):
        return
    raise ValueError(
        "A model must have something to minimize. Received: a model compiled "
        "without `loss`, none of whose layers calls `add_loss` or has a "
        "regularizer. Pass `loss=` to `compile`."
    )


def _check_outputs(plan: PipelinePlan, known: dict, rows: int | None) -> None:
    """Refuses outputs without a row for each row of several microbatches.

    `known` are specs of what the stages make of a microbatch of `rows` rows.
    """
    num_microbatches = plan.schedule.microbatches_per_batch
    if num_microbatches == 1:
        return
    for value in plan.graph.outputs:
        spec = known.get(keys.Activation(value))
        if spec is None or not _is_without_rows(spec.shape, rows):
            continue
        name = next(c for c in plan.graph.calls if value in c.outputs).name
        raise ValueError(
            "Each output must have a row for each row of the batch, because "
            "microbatches are concatenated. Received: an output of shape "
            f"{tuple(spec.shape)}, of layer {name!r}, for a microbatch of "
            f"{rows} rows. Use `PipelineModel(model, num_microbatches=1)`, or "
            "wrap a model without that output: `keras.Model(model.inputs, "
            "...)`."
        )


def _is_without_rows(shape, rows):
    if shape.rank == 0:
        return True
    if shape.rank is None or shape[0] is None or rows == 0:
        return False
    # With frames folded into the batch there are several for each row.
    return rows is None or shape[0] == 0 or shape[0] % rows != 0
