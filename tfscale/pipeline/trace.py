"""Traces a stage into pure functions of parameters, state and inputs.

What the functions take and return has keys, the same in all stages, so that
the executor can pass results of one on to another without knowing what they
are:

    ("param", n), ("state", n)     value of variable n
    ("new_state", n)               what the layers made of it
    ("value", v), ("mask", v)      tensor v of the model, and its Keras mask
    ("target", i)                  i-th tensor of (y, sample_weight)
    ("gradient", v)                of the loss, by tensor v
    ("gradient of", v)             what one user of tensor v adds to it
    ("sum", s, n)                  of the gradients by variable n in stage s
    ("losses",), ("divisors",)     of a microbatch, see losses.py
    ("added", s)                   sum of what layers gave to `add_loss`
    ("loss_scale",), ("added_scale",)   what the two count
    ("weight", n)                  rows or mask behind statistics n
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.distribute import _tf_internals
from tfscale.pipeline import failures
from tfscale.pipeline import losses
from tfscale.pipeline import phases
from tfscale.pipeline import rank_phases
from tfscale.pipeline import statistics
from tfscale.pipeline.graph import Value
from tfscale.pipeline.stages import Stage
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel import rules
from tfscale.tensor_parallel import sequence


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the last stage needs to compute the losses.

    Attributes:
        compile_loss: Keras' `CompileLoss`, or None.
        structure: `(y, sample_weight)`, with anything but None where tensors
            go.
        specs: `tf.TensorSpec`s of these tensors, flattened.
        pack: Puts the model's flattened outputs into their structure.
    """

    compile_loss: Any
    structure: Any
    specs: tuple[tf.TensorSpec, ...]
    pack: Any


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How stages are traced, the same for all of a model.

    Attributes:
        training: Whether gradients are needed.
        accumulate: Whether gradients are added to a sum.
        recompute: Whether the backward computes the forward again.
        weights_apart: Whether weight gradients are a phase of their own.
        jit_compile: Whether XLA compiles the functions.
    """

    training: bool
    accumulate: bool = False
    recompute: bool = False
    weights_apart: bool = False
    jit_compile: bool = False


@dataclasses.dataclass(frozen=True)
class TracedStage:
    """The functions of one stage.

    Attributes:
        phases: By the letter of the action that runs it: `"F"`, `"B"`, `"W"`.
            Of the last stage also `"D"`, which makes `("divisors",)` of the
            targets, unless they depend on masks.
        outputs: `tf.TensorSpec` of all that the forward returns, by key.
        sums: `tf.TensorSpec` of each `("sum", s, n)` that it makes.
        losses: Of the last stage, what its losses are.
        gathered: Of the last stage, the outputs that it returns in parts, and
            the dim along which model ranks have a part each.
    """

    phases: dict[str, phases.Phase]
    outputs: dict[Any, tf.TensorSpec]
    sums: dict[Any, tf.TensorSpec]
    losses: tuple[losses.CompiledLoss, ...]
    gathered: dict[Value, int]


def trace_stage(
    stage: Stage,
    numbers: dict[int, int],
    inputs: dict[Any, tf.TensorSpec],
    differentiable: set[Value],
    targets: Targets | None,
    options: TraceOptions,
) -> TracedStage:
    """Traces one stage and splits it into the phases of a schedule.

    Args:
        stage: The stage.
        numbers: The number of each variable, by `id(variable)`.
        inputs: Specs of the stage's input values and of their masks, by key.
        differentiable: Which inputs are made by parameters, and so need
            gradients.
        targets: Given for the last stage.
        options: How to trace.
    """
    trace = _Trace(stage, numbers, inputs, differentiable, targets, options)
    wrapped = tf.compat.v1.wrap_function(trace.run, [])
    made = phases.split(
        wrapped,
        trace.arguments,
        list(trace.parts().values()),
        jit_compile=options.jit_compile,
    )
    return TracedStage(
        phases=dict(zip(trace.parts(), made)),
        outputs=_specs(trace.forward),
        sums=_specs(trace.weight_gradients),
        losses=trace.losses,
        gathered=trace.gathered,
    )


def trace_on_ranks(
    stage: Stage,
    numbers: dict[int, int],
    inputs: dict[Any, tf.TensorSpec],
    differentiable: set[Value],
    targets: Targets | None,
    options: TraceOptions,
    devices: Sequence[Sequence[str]],
    sequence_plan: sequence.Plan | None = None,
) -> list[TracedStage]:
    """Traces one stage for all model ranks at once, in one graph.

    Args:
        stage: See `trace_stage`, like the other arguments.
        numbers: See there.
        inputs: See there; the same for all ranks.
        differentiable: See there.
        targets: See there.
        options: See there. There is no XLA.
        devices: Those of the ranks, `devices[replica][rank]`.
        sequence_plan: What of the model is divided along the sequence.

    Returns:
        What each rank runs; all have to run a phase at the same time.
    """
    traces = []

    def run_rank():
        arguments = stage, numbers, inputs, differentiable, targets, options
        traces.append(_Trace(*arguments))
        with sequence.following(sequence_plan):
            traces[-1].run()

    wrapped = rank_phases.trace(run_rank, devices[0])
    made = rank_phases.split(
        wrapped,
        [trace.arguments for trace in traces],
        [list(trace.parts().values()) for trace in traces],
        devices,
    )
    return [
        TracedStage(
            phases=dict(zip(trace.parts(), phases_of_rank)),
            outputs=_specs(trace.forward),
            sums=_specs(trace.weight_gradients),
            losses=trace.losses,
            gathered=trace.gathered,
        )
        for trace, phases_of_rank in zip(traces, made)
    ]


class _Scope(keras.StatelessScope):
    """Values in the place of variables, as a rank uses them."""

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        if value is None or not variable.trainable:
            return value
        return collectives.as_used(value)


class _Trace:
    """Builds the graph of a stage, and keeps what is what in it."""

    def __init__(
        self, stage, numbers, inputs, differentiable, targets, options
    ):
        self._stage = stage
        self._numbers = numbers
        self._inputs = inputs
        self._differentiable = differentiable
        self._targets = targets
        self._options = options
        self.arguments = {}
        self.forward = {}
        self.input_gradients = {}
        self.weight_gradients = {}
        self.side_effects = []
        self.losses = ()
        self.gathered = {}

    def run(self):
        """Forward and, in training, backward; inside the graph."""
        # So that branches of a `tf.cond` keep their assertions and prints.
        graph = tf.compat.v1.get_default_graph()
        graph._add_control_dependencies = True
        with tf.name_scope(f"stage_{self._stage.index}"):
            if not self._options.training:
                self._forward()
                return
            self._backward(*self._forward())

    def parts(self):
        """What to split the graph into, by the letter of the action."""
        name = f"stage_{self._stage.index}"
        forward = dict(self.forward)
        parts = {}
        if self._options.training and ("divisors",) in forward:
            divisors = {("divisors",): forward.pop(("divisors",))}
            needed = phases.needed_arguments(
                list(divisors.values()), self.arguments
            )
            # Backwards begin before the last forward ends: what divides their
            # losses has to be known before, from targets alone.
            if all(key[0] == "target" for key in needed):
                parts["D"] = phases.Part(f"{name}_divisors", divisors)
        parts["F"] = phases.Part(f"{name}_forward", forward, self.side_effects)
        if not self._options.training:
            return parts
        restart = self._options.recompute
        gradients = [self.input_gradients, self.weight_gradients]
        if not self._options.weights_apart:
            gradients = [{**gradients[0], **gradients[1]}]
        for letter, results in zip("BW", gradients):
            parts[letter] = phases.Part(
                f"{name}_{'backward' if letter == 'B' else 'weights'}",
                results,
                restart=restart and letter == "B",
            )
        return parts

    def _argument(self, key, shape, dtype):
        self.arguments[key] = tf.compat.v1.placeholder(dtype, shape)
        return self.arguments[key]

    def _variable(self, kind, variable):
        """An argument for the value of a variable, or for a rank's shard."""
        key = kind, self._numbers[id(variable)]
        shape = variable.shape
        if self._shard_dim(variable) is not None:
            shape = variable._value.values[0].shape
        return self._argument(key, shape, variable.dtype)

    def _shard_dim(self, variable):
        if collectives.num_ranks() == 1:
            return None
        return rules.split_dim(variable)

    def _whole(self, variable, value):
        """What layers without a rule see of a sharded variable."""
        dim = self._shard_dim(variable)
        return (
            value if dim is None else collectives.gather_from_ranks(value, dim)
        )

    def _forward(self):
        stage = self._stage
        params = [self._variable("param", v) for v in stage.trainable]
        states = [self._variable("state", v) for v in stage.state]
        tensors = {
            key: self._argument(key, spec.shape, spec.dtype)
            for key, spec in self._inputs.items()
        }
        values = {v: tensors["value", v] for v in stage.inputs}
        for value, tensor in values.items():
            if ("mask", value) in tensors:
                _tf_internals.set_keras_mask(tensor, tensors["mask", value])
        whole, shards = [], {}
        for variable, value in zip(
            [*stage.trainable, *stage.state], [*params, *states]
        ):
            whole.append((variable, self._whole(variable, value)))
            if self._shard_dim(variable) is not None:
                shards[id(variable)] = value
        given = dict(shards)
        with (
            _Scope(state_mapping=whole, collect_losses=True) as scope,
            rules.given_shards(shards),
        ):
            for call in stage.calls:
                statistics.record_weights(
                    call, values, self._numbers, self.forward
                )
                with failures.noted(call.name, stage.index):
                    call.run(values, self._options.training)
            total = self._losses(scope.losses, values)
        for variable, state in whole[len(params) :]:
            key = "new_state", self._numbers[id(variable)]
            new_state = scope.get_current_value(variable)
            dim = self._shard_dim(variable)
            if (
                dim is not None
                and shards[id(variable)] is not given[id(variable)]
            ):
                self.forward[key] = shards[id(variable)]
            elif new_state is not state:
                if dim is not None:
                    new_state = collectives.own_part(new_state, dim)
                self.forward[key] = new_state
        for value in stage.outputs:
            mask = _tf_internals.get_keras_mask(values[value])
            if mask is not None:
                self.forward["mask", value] = tf.identity(mask)
            output = values[value]
            if self._targets is not None:
                # Whether anybody but the loss wants it whole is not known yet.
                part = collectives.part_before_gather(output)
                if part is not None:
                    output, self.gathered[value] = part
            # An output may be an input: never the same tensor.
            self.forward["value", value] = tf.identity(output)
        self.side_effects = [
            operation
            for operation in tf.compat.v1.get_default_graph().get_operations()
            if operation.op_def.is_stateful and not operation.outputs
        ]
        inputs = {
            v: values[v] for v in stage.inputs if v in self._differentiable
        }
        return total, params, inputs

    def _losses(self, added, values):
        """Adds losses to the results, returns what is to be minimised."""
        total = tf.zeros(())
        if added:
            added = tf.add_n(
                [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in added]
            )
            self.forward["added", self._stage.index] = added
            scale = self._argument(("added_scale",), [], tf.float32)
            total += tf.math.multiply_no_nan(added, scale)
        if self._targets is None:
            return total
        targets = self._targets
        tensors = [
            self._argument(("target", i), spec.shape, spec.dtype)
            for i, spec in enumerate(targets.specs)
        ]
        rest = iter(tensors)
        y, sample_weight = keras.tree.map_structure(
            lambda x: None if x is None else next(rest), targets.structure
        )
        y_pred = targets.pack([values[v] for v in self._stage.outputs])
        self.losses = losses.compiled_losses(
            targets.compile_loss, y, y_pred, sample_weight
        )
        if not self.losses:
            return total
        self.forward["losses",] = tf.stack([x.value for x in self.losses])
        self.forward["divisors",] = tf.stack([x.divisor for x in self.losses])
        # The weight of each loss and microbatch; 0 for an empty microbatch,
        # whose loss is 0 / 0.
        scale = self._argument(("loss_scale",), [len(self.losses)], tf.float32)
        return total + tf.reduce_sum(
            tf.math.multiply_no_nan(self.forward["losses",], scale)
        )

    def _backward(self, total, params, inputs):
        outputs, gradients = [total], [tf.ones(())]
        if self._targets is None:
            for value in self._stage.outputs:
                tensor = self.forward["value", value]
                if tensor.dtype.is_floating:
                    key = "gradient", value
                    outputs.append(tensor)
                    gradients.append(
                        self._argument(key, tensor.shape, tensor.dtype)
                    )
        inputs = {v: x for v, x in inputs.items() if x.dtype.is_floating}
        # No tape: nothing is recorded in an `init_scope`.
        found = tf.gradients(outputs, [*params, *inputs.values()], gradients)
        by_params, by_inputs = found[: len(params)], found[len(params) :]
        for (value, tensor), gradient in zip(inputs.items(), by_inputs):
            if gradient is None:
                gradient = tf.zeros_like(tensor)
            # Dense, also where rows of the input were looked up.
            gradient = tf.convert_to_tensor(gradient)
            self.input_gradients["gradient of", value] = gradient
        for variable, gradient in zip(self._stage.trainable, by_params):
            if gradient is None:
                continue
            # Dense: the rows of a lookup are added up. In float32: sums of
            # many half-precision gradients lose what is small.
            gradient = tf.convert_to_tensor(gradient)
            if gradient.dtype.size < 4:
                gradient = tf.cast(gradient, tf.float32)
            number = self._numbers[id(variable)]
            key = "sum", self._stage.index, number
            if self._options.accumulate:
                gradient += self._argument(key, gradient.shape, gradient.dtype)
            self.weight_gradients[key] = gradient


def _specs(results):
    return {
        key: tf.TensorSpec(tensor.shape, tensor.dtype)
        for key, tensor in results.items()
    }


def trace_divisors(stages, numbers, inputs, targets: Targets) -> phases.Phase:
    """A function for the divisors of a microbatch where masks decide them.

    It is the forward of the whole model, less all that masks do not need.
    """
    whole = dataclasses.replace(
        stages[-1],
        calls=tuple(call for stage in stages for call in stage.calls),
        inputs=tuple(key[1] for key in inputs),
        variables=tuple(
            {id(v): v for stage in stages for v in stage.variables}.values()
        ),
    )
    trace = _Trace(
        whole, numbers, inputs, set(), targets, TraceOptions(training=False)
    )
    wrapped = tf.compat.v1.wrap_function(trace.run, [])
    part = phases.Part("divisors", {("divisors",): trace.forward["divisors",]})
    return phases.split(wrapped, trace.arguments, [part])[0]
