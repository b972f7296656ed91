"""Builds the graph of a stage: its layers, losses and gradients."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.pipeline.stages.graph import Value
from tfscale.pipeline.stages.stages import Stage
from tfscale.pipeline.tracing import failures
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing import stage_losses
from tfscale.pipeline.tracing.stage_losses import Targets
from tfscale.pipeline.tracing.stage_variables import StageVariables
from tfscale.step import batch_norm
from tfscale.step import losses
from tfscale.variables.of_variable import is_overwritten


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How stages are traced, the same for all of a model.

    With `accumulate` gradients are added to a sum, with `recompute` the
    backward computes the forward again, with `weights_apart` weight gradients
    are a phase of their own.
    """

    training: bool
    accumulate: bool = False
    recompute: bool = False
    weights_apart: bool = False
    jit_compile: bool = False
    has_replicas: bool = False


@dataclasses.dataclass(eq=False)
class StageGraph:
    """The graph of a stage.

    `inputs` are specs of its input values, None for those that are None, and of
    their masks, `numbers` those of variables, by `id(variable)`; the last stage
    has `targets`.

    Attributes:
        arguments: Placeholders for all arguments, by key of keys.py.
        forward: Results of the forward, by key.
        input_gradients: Results of the backward for earlier stages, by key.
        weight_gradients: Results of the backward for the optimizer, by key.
        side_effects: Operations of the forward that run for their own sake.
        losses, gathered, batch_norms: See `TracedStage`.
        by_added: Of the last stage, the gradient of a custom `compute_loss` by
            what layers add to it; None if there is none.
    """

    stage: Stage
    numbers: dict[int, int]
    inputs: dict[Any, tf.TensorSpec]
    differentiable: set[Value]
    targets: Targets | None
    options: TraceOptions
    arguments: dict = dataclasses.field(default_factory=dict)
    forward: dict = dataclasses.field(default_factory=dict)
    input_gradients: dict = dataclasses.field(default_factory=dict)
    weight_gradients: dict = dataclasses.field(default_factory=dict)
    side_effects: list = dataclasses.field(default_factory=list)
    losses: tuple = ()
    gathered: dict = dataclasses.field(default_factory=dict)
    batch_norms: dict = dataclasses.field(default_factory=dict)
    by_added: tf.Tensor | None = None

    @property
    def name(self) -> str:
        """The name scope of its operations."""
        return f"stage_{self.stage.index}"

    def build(self) -> None:
        """Forward and, in training, backward; inside of a graph."""
        graph = tf.compat.v1.get_default_graph()
        attributes.keep_side_effects_of_branches(graph)
        with tf.name_scope(self.name):
            total, params, inputs = self._forward()
            if self.options.training:
                forward = _python_functions(graph)
                self._backward(total, params, inputs)
                has_gradient = len(_python_functions(graph)) > len(forward)
                if has_gradient and self.options.accumulate:
                    # TensorFlow keeps a tape for each in the graph, and
                    # microbatches would take it from one another.
                    name = forward[0].name.removeprefix(f"{self.name}/")
                    raise ValueError(
                        "A `tf.py_function` with a gradient can be called "
                        f"only once in a step. Received: {name!r} in a "
                        "pipeline of several microbatches. Set "
                        "num_microbatches=1, or write it with operations of "
                        "TensorFlow, or with `tf.custom_gradient` and "
                        "`tf.numpy_function`."
                    )

    def _argument(self, key, shape, dtype):
        if key not in self.arguments:
            self.arguments[key] = tf.compat.v1.placeholder(dtype, shape)
        return self.arguments[key]

    def _forward(self):
        """Returns the total to minimise, parameters and inputs."""
        stage = self.stage
        variables = StageVariables(stage, self.numbers, self._argument)
        tensors = {
            key: self._argument(key, spec.shape, spec.dtype)
            for key, spec in self.inputs.items()
            if spec is not None
        }
        # A value that is None is no argument.
        values = {v: tensors.get(keys.Activation(v)) for v in stage.inputs}
        for value, tensor in values.items():
            if keys.Mask(value) in tensors:
                symbols.set_keras_mask(tensor, tensors[keys.Mask(value)])
        replica = None
        if self.options.has_replicas:
            replica = self._argument(keys.REPLICA, [], tf.int64)
        noted = batch_norm.NotedMoments()
        with (
            variables.replaced(),
            step_context.within_ranks(replica=replica),
            step_context.within(moments=noted),
        ):
            added = []
            for call in stage.calls:
                with failures.noted(call.name, stage.index):
                    call.run(values, self.options.training)
                # Another call of the layer would clear them.
                added += variables.take_losses()
            total = self._losses(added, values)
        self.forward.update(variables.new_states())
        self._note_moments(noted.take())
        for value in stage.outputs:
            # An output of the model that an earlier stage made, or that was
            # fed, is there already.
            if values[value] is not None and value not in stage.inputs:
                self._output(value, values[value])
        graph = tf.compat.v1.get_default_graph()
        self.side_effects = [
            operation
            for operation in graph.get_operations()
            if operation.op_def.is_stateful and not operation.outputs
        ]
        inputs = {
            v: values[v]
            for v in stage.inputs
            if v in self.differentiable and values[v] is not None
        }
        return total, variables.params, inputs

    def _note_moments(self, calls):
        """Returns moments, in the place of averages of a microbatch."""
        found = {}
        for averages, moments in calls:
            layer = averages.layer
            key = keys.Moments(self.stage.index, moments.dtype.name)
            found.setdefault(key, []).append(moments)
            self.batch_norms.setdefault(key, []).append(
                (layer, moments.shape[1])
            )
            for variable in (layer.moving_mean, layer.moving_variance):
                number = self.numbers[id(variable)]
                self.forward.pop(keys.NewState(number), None)
        for key, of_calls in found.items():
            self.forward[key] = tf.concat(of_calls, axis=1)

    def _output(self, value, tensor):
        mask = symbols.get_keras_mask(tensor)
        if mask is not None:
            self.forward[keys.Mask(value)] = tf.identity(mask)
        if self.targets is not None:
            # Whether anybody but the loss wants it whole is not known yet.
            shard = rank_collectives.shard_before_gather(tensor)
            if shard is not None:
                tensor, self.gathered[value] = shard
        # An output may be an input: never the same tensor.
        self.forward[keys.Activation(value)] = tf.identity(tensor)

    def _losses(self, added, values):
        """Adds losses to the results, returns the total to minimise."""
        total = tf.zeros((), losses.precision())
        if added:
            added = (tf.cast(loss, losses.precision()) for loss in added)
            added = tf.add_n(list(map(tf.reduce_sum, added)))
            self.forward[keys.AddedLoss(self.stage.index)] = added
            scale = self._argument(keys.ADDED_SCALE, [], losses.precision())
            total += tf.math.multiply_no_nan(added, scale)
        if self.targets is None:
            return total
        self.losses, self.by_added = stage_losses.find(
            self.targets,
            [values[v] for v in self.stage.outputs],
            self._argument,
            training=self.options.training,
        )
        if not self.losses:
            return total
        self.forward[keys.LOSSES] = tf.stack([x.mean for x in self.losses])
        self.forward[keys.DIVISORS] = tf.stack([x.divisor for x in self.losses])
        # The weight of each loss and microbatch; 0 for an empty microbatch,
        # whose loss is 0 / 0.
        scale = self._argument(
            keys.LOSS_SCALE, [len(self.losses)], losses.precision()
        )
        totals = tf.stack([x.total for x in self.losses])
        return total + tf.reduce_sum(tf.math.multiply_no_nan(totals, scale))

    def _backward(self, total, params, inputs):
        outputs, gradients = [total], [tf.ones((), losses.precision())]
        if self.targets is None:
            for value in self.stage.outputs:
                tensor = self.forward.get(keys.Activation(value))
                if (
                    value in self.differentiable
                    and tensor is not None
                    and _has_gradient(tensor)
                ):
                    key = keys.Gradient(value)
                    outputs.append(tensor)
                    gradients.append(
                        self._argument(key, tensor.shape, tensor.dtype)
                    )
        inputs = {v: x for v, x in inputs.items() if _has_gradient(x)}
        _check_not_recomputed(self.stage.trainable, params)
        # No tape: nothing is recorded in an `init_scope`.
        found = tf.gradients(outputs, [*params, *inputs.values()], gradients)
        by_params, by_inputs = found[: len(params)], found[len(params) :]
        for (value, tensor), gradient in zip(inputs.items(), by_inputs):
            if gradient is None:
                gradient = tf.zeros_like(tensor)
            # Dense, also where rows of the input were looked up. A W may read
            # the gradient too: never the same tensor.
            gradient = tf.identity(tf.convert_to_tensor(gradient))
            self.input_gradients[keys.Gradient(value)] = gradient
        for variable, gradient in zip(self.stage.trainable, by_params):
            if gradient is None:
                continue
            # Dense: the rows of a lookup are added up. In float32: sums of
            # many half-precision gradients lose what is small.
            gradient = tf.convert_to_tensor(gradient)
            if gradient.dtype.size < 4:
                gradient = tf.cast(gradient, tf.float32)
            number = self.numbers[id(variable)]
            key = keys.GradientSum(self.stage.index, number)
            if self.options.accumulate:
                # Of what overwrites a variable Keras takes the maximum.
                combine = tf.maximum if is_overwritten(variable) else tf.add
                before = self._argument(key, gradient.shape, gradient.dtype)
                gradient = combine(before, gradient)
            self.weight_gradients[key] = gradient


def _has_gradient(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _python_functions(graph):
    return [op for op in graph.get_operations() if op.type == "EagerPyFunc"]


def _check_not_recomputed(variables, params):
    for variable, param in zip(variables, params):
        if any(map(attributes.is_recomputed, param.consumers())):
            raise ValueError(
                "`keras.remat` cannot be used in a stage, where weights are "
                "tensors: it has gradients of arguments and variables only. "
                f"Received: {variable.path!r}, read in a recomputed function. "
                "Remove `keras.remat`, and recompute stages: "
                "`PipelineModel(..., recompute=True)`."
            )
