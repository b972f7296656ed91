"""Steps of a pipeline with one batch: `fit`, `evaluate` and `predict`."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import instances
from tfscale.adapters.function import for_any_rows
from tfscale.adapters.layer import adapt_layers
from tfscale.adapters.model import StagedModel
from tfscale.adapters.model import adapt_compile_loss
from tfscale.adapters.optimizer import apply_sums
from tfscale.context import step_context
from tfscale.graphs.function_options import assembled
from tfscale.graphs.function_options import outermost
from tfscale.mesh.gradient_reduction import shard_gradient
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.pipeline.running import checks
from tfscale.pipeline.running import placement
from tfscale.pipeline.running import window
from tfscale.pipeline.running.step import PipelineStep
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import failures
from tfscale.pipeline.tracing.program import Program
from tfscale.pipeline.tracing.program import Programs
from tfscale.schedules.named_schedules import of_window
from tfscale.step import batch_norm
from tfscale.step import losses
from tfscale.step.batch_shard import BatchShard


class PipelineTrainer(WrappedModel, StagedModel):
    """The steps of a `PipelineModel`, which Keras' loops call."""

    _follow_variables: Callable[[], None]
    # Whether XLA compiles clusters of a step, as model ranks exchange tensors
    # within stages; else it compiles stages.
    _has_clusters = False

    def __init__(self, model: keras.Model, plan: PipelinePlan):
        super().__init__(model)
        self._plan = plan
        self._programs = Programs(plan, self.distribute_strategy)
        adapt_layers(attributes.flatten_layers(model))

    @property
    def plan(self) -> PipelinePlan:
        """Stages, schedule and homes of variables."""
        return self._plan

    @property
    def programs(self) -> list[Program]:
        """The functions that were traced, one set for each kind of batch."""
        return list(self._programs)

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """The model itself, without a pipeline."""
        checks.check_preprocessed(self.model, inputs)
        return super().call(inputs, training=training, mask=mask)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One optimizer step on a batch; in replica context."""
        if self._plan.schedule.has_updates:
            is_one = not isinstance(data, window.Window)
            return self._train_window((data,) if is_one else data.batches)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._check_built()
        scale = self._loss_scale()
        targets = self._targets(x, y, sample_weight)
        step, result = self._run(x, targets, True, loss_scale=scale)
        with contextlib.ExitStack() as stack:
            if not isinstance(
                self.optimizer, keras.optimizers.LossScaleOptimizer
            ):
                (loss,) = batch_norm.sum_over_replicas([result.loss])
                checked = tf.debugging.check_numerics(loss, failures.NOT_FINITE)
                stack.enter_context(tf.control_dependencies([checked]))
            noting = stack.enter_context(batch_norm.noting())
            step.assign(result, noting)
            gradients = step.sum_gradients(result.gradients)
            penalty = self._add_penalties(gradients, scale=scale)
            self._apply(gradients)
        return self._log(step, result, penalty, x, y, sample_weight)

    def _train_window(self, batches):
        self._check_built()
        unpack = keras.utils.unpack_x_y_sample_weight
        batches = [unpack(b) for b in window.with_equal_shapes(batches)]
        schedule = of_window(self._plan.schedule, len(batches))
        prepared = [
            self._prepare(x, self._targets(x, y, w), True)
            for x, y, w in batches
        ]
        shards = [shard.of_batch(x) for _, (x, _, shard) in prepared]
        step = PipelineStep(
            self._plan,
            prepared[0][0],
            self.distribute_strategy,
            reads_outputs=self._reads_outputs,
        )
        self._counters.set(self.optimizer.iterations)
        zero = tf.zeros((), losses.precision())
        scale = self._loss_scale()
        updates = window.StageUpdates(
            step,
            schedule,
            self.optimizer,
            self._counters,
            functools.partial(self._add_penalties, scale=scale),
            [zero] * len(batches),
        )
        results = step.run(
            [
                (x, targets, shard)
                for (_, (x, targets, _)), shard in zip(prepared, shards)
            ],
            actions=schedule.order(),
            loss_scale=scale,
            training=True,
            update=updates,
        )
        self.optimizer.iterations.assign_add(len(batches))
        logs = {}
        for data, shard, result, penalty in zip(
            batches, shards, results, updates.penalties, strict=True
        ):
            with batch_norm.noting() as noting:
                step.assign(result, noting)
            with step_context.within(batch_shard=shard):
                logs = self._log(step, result, penalty, *data)
        return logs

    def _loss_scale(self):
        return self.optimizer.scale_loss(tf.ones((), losses.precision()))

    def test_step(self, data: Any) -> dict[str, Any]:
        """Loss and metrics of a batch; in replica context."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._check_built()
        targets = self._targets(x, y, sample_weight)
        step, result = self._run(x, targets, False)
        penalty = self._add_penalties(None)
        return self._log(step, result, penalty, x, y, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Predictions for a batch; in replica context."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        _, result = self._run(x, None, False)
        return self._plan.graph.pack_outputs(result.outputs)

    def predict_on_batch(self, x: Any) -> Any:
        """See `keras.Model`, which would give all of it to every replica."""
        first = next(each for each in keras.tree.flatten(x) if each is not None)
        return self.predict(x, batch_size=len(first), verbose=0)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool | None = True,
    ) -> Any:
        """See `keras.Model`; that of the model inside, if it has its own.

        A training step calls it for each microbatch, and only where a model
        has its own, or a subclass of this one.
        """
        if not checks.is_custom(self.model, "compute_loss"):
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        compute_loss = instances.view(
            self.model,
            **attributes.with_losses(
                lambda: self._compile_loss,
                lambda: self.losses,
            ),
        ).compute_loss
        if "training" in inspect.signature(compute_loss).parameters:
            return compute_loss(x, y, y_pred, sample_weight, training=training)
        return compute_loss(x, y, y_pred, sample_weight)

    @property
    def _has_custom_loss(self):
        return (
            self.__class__.compute_loss is not PipelineTrainer.compute_loss
            or checks.is_custom(self.model, "compute_loss")
        )

    @property
    def _reads_outputs(self):
        """Whether metrics do: a loop keeps those of all microbatches for it."""
        return self._compile_metrics is not None or checks.is_custom(
            self, "compute_metrics"
        )

    def _compiled_programs(self, jit_compile):
        if self._has_custom_loss:
            adapt_compile_loss(self._compile_loss)
        return Programs(
            self._plan,
            self.distribute_strategy,
            self._compile_loss,
            jit_compile,
            self if self._has_custom_loss else None,
        )

    def _targets(self, x, y, sample_weight):
        if self._has_custom_loss:
            return y, sample_weight, x
        return y, sample_weight

    def make_train_function(self, force: bool = False) -> Any:
        """See `keras.Model`; of stages that are optimized."""
        self._follow_variables()
        with self._compiled_here():
            super().make_train_function(force)
        if self._plan.schedule.has_updates:
            drawing: Callable = functools.partial(
                window.in_windows, size=self.steps_per_execution
            )
        else:
            drawing = for_any_rows
        self.train_function = self._outermost(self.train_function, drawing)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """See `keras.Model`; of stages that are optimized."""
        self._follow_variables()
        with self._compiled_here():
            super().make_test_function(force)
        self.test_function = self._outermost(self.test_function, for_any_rows)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """See `keras.Model`; of stages that are optimized."""
        checks.check_predictions(self.model)
        self._follow_variables()
        with self._compiled_here():
            super().make_predict_function(force)
        self.predict_function = self._outermost(self.predict_function)
        return self.predict_function

    @contextlib.contextmanager
    def _compiled_here(self):
        """Within it Keras does not compile the step: XLA compiles stages."""
        is_compiled, self.jit_compile = self.jit_compile, False
        try:
            yield
        finally:
            self.jit_compile = is_compiled

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """See `keras.Model`; only if something is left to build.

        Keras takes a batch from an iterator made for this alone, in every
        `fit`.
        """
        trackers = [*attributes.flatten_layers(self), *self.metrics]
        trackers += [self._compile_loss, getattr(self, "optimizer", None)]
        if not checks.are_built(trackers):
            super()._maybe_symbolic_build(iterator, data_batch)

    def _outermost(self, function, drawing=lambda function: function):
        if getattr(function, "is_outermost", False):
            return function
        return outermost(
            drawing(function),
            lambda: failures.explained(self._plan.stages),
            # To leave Grappler out as well gained nothing.
            lambda: assembled(of_clusters=self._has_clusters),
        )

    def _check_built(self):
        # A custom loss may have no use for the one given to `compile`.
        loss = None if self._has_custom_loss else self._compile_loss
        checks.check_built(self, loss)

    def _measured_step(self, data, emit):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        targets = self._targets(x, y, sample_weight)
        return self._run(x, targets, True, emit=emit)[1]

    def _run(self, x, targets, training, loss_scale=1.0, emit=None):
        program, batch = self._prepare(x, targets, training)
        actions = self._plan.schedule.order()
        if not training:
            count = self._plan.schedule.microbatches_per_batch
            actions = (
                action
                for action in actions
                if action.kind == "F" and action.microbatch < count
            )
        step = PipelineStep(
            self._plan,
            program,
            self.distribute_strategy,
            emit=emit,
            reads_outputs=targets is None or self._reads_outputs,
        )
        (result,) = step.run(
            [batch], actions=actions, loss_scale=loss_scale, training=training
        )
        if not training:
            with batch_norm.noting() as noting:
                step.assign(result, noting)
        return step, result

    def _prepare(self, x, targets, training):
        """The program of a batch, its flat inputs, targets, and its shard."""
        checks.check_variables(self._plan)
        checks.check_preprocessed(self.model, x)
        checks.check_batch((x, targets))
        inputs = self._plan.graph.flatten_inputs(x)
        program = self._programs.get(inputs, targets, training=training)
        shard = step_context.current().batch_shard
        if shard is None:
            shard = BatchShard.of_replica(inputs)
        return program, (inputs, targets, shard)

    def _add_penalties(self, gradients, values=None, *, scale=1.0):
        """The sum of regularizers, of all variables or `values` by number.

        Adds their gradients, times `scale`, unless `gradients` is None.
        """
        total = tf.zeros((), losses.precision())
        extended = self.distribute_strategy.extended
        for number, variable in enumerate(self._plan.variables):
            if (
                variable.regularizer is None
                or not variable.trainable
                or (values is not None and number not in values)
            ):
                continue
            with tf.GradientTape() as tape:
                value = tf.convert_to_tensor(
                    (values or {}).get(number, variable)
                )
                tape.watch(value)
                penalty = variable.regularizer(value)
            total += tf.cast(penalty, total.dtype)
            if gradients is not None:
                gradient = tape.gradient(penalty, value)
                gradient = shard_gradient(extended, gradient, variable)
                gradient *= tf.cast(scale, gradient.dtype)
                # The loss need not depend on the variable.
                if number in gradients:
                    gradient = gradients[number] + gradient
                gradients[number] = gradient
        return total

    def _apply(self, gradients):
        numbers = self._plan.numbers
        variables = self.trainable_variables
        with placement.on_device_of_inputs():
            apply_sums(
                self.optimizer,
                [gradients.get(numbers.get(id(v))) for v in variables],
                variables,
            )

    def _log(self, step, result, penalty, x, y, sample_weight):
        inputs = result.inputs
        rows = tf.shape(inputs[0])[0]
        # The first of all metrics is the mean of the loss.
        self.metrics[0].update_state(result.loss + penalty, sample_weight=rows)
        if self._compile_loss is not None:
            # A custom `compute_loss` may be called several times.
            metrics = itertools.cycle(self._compile_loss.metrics)
            single = (
                result.losses[:-1] if self._has_custom_loss else result.losses
            )
            known = inputs[0].shape[0]
            losses.log(metrics, single, known, result.share, rows)
        y_pred = None
        if result.outputs:
            y_pred = self._plan.graph.pack_outputs(result.outputs)
        # Where the predictions are, which are larger than what comes of them.
        with tf.device(step.devices[-1]):
            return self.compute_metrics(
                x, y, y_pred, sample_weight=sample_weight
            )
