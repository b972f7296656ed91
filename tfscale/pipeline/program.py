"""All functions of a model, traced for one kind of batch."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfscale.pipeline import trace
from tfscale.pipeline.phases import Phase
from tfscale.pipeline.plan import Plan


@dataclasses.dataclass(frozen=True)
class Program:
    """What the executor runs.

    Attributes:
        stages: The functions of each stage.
        divisors: In training, makes `("divisors",)` of a microbatch; None if
            there is no loss to divide.
    """

    stages: tuple[trace.TracedStage, ...]
    divisors: Phase | None


def trace_program(
    plan: Plan,
    inputs: list[tf.Tensor],
    targets: Any,
    *,
    training: bool,
    compile_loss=None,
    jit_compile: bool = False,
    devices=None,
) -> list[Program]:
    """Traces every stage for microbatches of a batch like this one.

    Args:
        plan: The model.
        inputs: The model's inputs, flat, with the rows of a whole batch.
        targets: `(y, sample_weight)`, likewise, or None to predict.
        training: Whether there will be backwards.
        compile_loss: The `CompileLoss` of the model.
        jit_compile: Whether XLA compiles the functions.
        devices: `devices[replica][pipeline_rank][model_rank]`, of model ranks
            if there are any.

    Returns:
        A program for each model rank.
    """
    schedule = plan.schedule
    options = trace.TraceOptions(
        training=training,
        accumulate=schedule.num_microbatches > 1,
        recompute=plan.recompute,
        weights_apart=any(action.kind == "W" for action in schedule.order()),
        jit_compile=jit_compile,
    )

    def spec(tensor):
        rows = tensor.shape[0]
        if rows is None or rows % schedule.num_microbatches:
            rows = None
        else:
            rows //= schedule.num_microbatches
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    known = {
        ("value", value): spec(tensor)
        for value, tensor in zip(plan.graph.inputs, inputs)
    }
    fed = dict(known)
    if targets is not None:
        targets = trace.Targets(
            compile_loss,
            targets,
            tuple(
                spec(x) for x in keras.tree.flatten(targets) if x is not None
            ),
            plan.graph.pack_outputs,
        )
    functional = plan.graph.functional
    sequence_plan = None
    if hasattr(functional, "_sequence_call"):
        sequence_plan = functional._sequence_call.plan_for(
            keras.tree.pack_sequence_as(functional._inputs_struct, inputs)
        )
    traced = []
    num_ranks = len(devices[0][0]) if devices else 1
    # The functions belong to the model, not to the graph of this step.
    with tf.init_scope():
        for stage in plan.stages:
            is_last = stage.index == len(plan.stages) - 1
            keys = [
                key
                for value in stage.inputs
                for key in (("value", value), ("mask", value))
                if key in known
            ]
            arguments = (
                stage,
                plan.numbers,
                {key: known[key] for key in keys},
                plan.made,
                targets if is_last else None,
                options,
            )
            if num_ranks == 1:
                traced.append([trace.trace_stage(*arguments)])
            else:
                home = schedule.stage_devices[stage.index]
                ranks = [of_replica[home] for of_replica in devices]
                traced.append(
                    trace.trace_on_ranks(*arguments, ranks, sequence_plan)
                )
            known.update(traced[-1][0].outputs)
        last = traced[-1][0]
        divisors = last.phases.get("D")
        if training and divisors is None and last.losses:
            divisors = trace.trace_divisors(
                plan.stages, plan.numbers, fed, targets
            )
    return [
        Program(stages, stages[-1].phases.get("D", divisors))
        for stages in zip(*traced)
    ]
