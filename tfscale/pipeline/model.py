"""A Keras model that trains as a pipeline of stages."""

import contextlib
import functools

import keras
import tensorflow as tf

from tfscale.distribute import MeshStrategy
from tfscale.distribute import _tf_internals
from tfscale.pipeline import failures
from tfscale.pipeline import measure
from tfscale.pipeline import placement
from tfscale.pipeline import summary
from tfscale.pipeline.grappler import no_grappler
from tfscale.pipeline.plan import Plan
from tfscale.pipeline.plan import make_plan
from tfscale.pipeline.program import Program
from tfscale.pipeline.program import trace_program
from tfscale.pipeline.schedule import Schedule
from tfscale.pipeline.schedule import get_schedule
from tfscale.pipeline.step import ReplicaStep
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel import rules
from tfscale.tensor_parallel import sequence_model


class PipelineModel(keras.Model):
    """Trains a Keras model over the pipeline axis of a mesh.

    The layers are cut into stages, each on its own device; a batch is cut
    into microbatches, which go through the stages one behind the other
    (Huang et al. 2019, "GPipe"). `compile`, `fit`, `evaluate`, `predict` and
    the `*_on_batch` methods are those of Keras and give the numbers of one
    device: losses, gradients, metrics and moving statistics are those of the
    whole batch, however it is divided. What is saved is the plain model.

    Three things differ from one device, as in every pipeline:
    `BatchNormalization` normalises each microbatch by itself in training (its
    moving statistics are those of the whole batch, updated once per step);
    random layers draw other numbers, since they draw once per microbatch (and
    equal ones on all data replicas, as in Keras under any strategy); and what
    a layer gives to `add_loss` is taken for a mean over the rows.

    A loss that is not finite ends training with a `FloatingPointError`, before
    any variable is changed; not so with a `LossScaleOptimizer`, which skips
    such steps. Calling the model itself, `model(x)`, runs without a pipeline.

    Args:
        model: A built Sequential or functional model, made in the scope of
            the strategy and not compiled. Nested models are opened up; layers
            may be called twice (tied weights) and be of any kind.
        num_microbatches: How many microbatches a (per-replica) batch is cut
            into. Need not divide it. The bubble, during which devices wait,
            is `(S - 1) / (num_microbatches + S - 1)` of a step for S stages.
        schedule: `"1f1b"`, `"gpipe"`, or a `tfscale.pipeline.Schedule`.
        balance: How to cut: `"flops"`, `"params"` or `"time"` make the dearest
            stage as cheap as can be; a list names the layers that begin
            stages 1, 2, ...
        recompute: Whether to keep only the inputs of stages and compute the
            rest again in the backward pass, with the same dropout masks.
        memory_limit: Bytes that each device may take, or None. Cuts are then
            chosen among those that fit.
        microbatch_size: Rows of a microbatch, for estimates of memory and
            for `balance="time"`.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If not in the scope of a `MeshStrategy`; if the model was
            made outside it, is compiled, not built, or has a `call` of its
            own; if `num_microbatches` is less than 1; if there are more
            stages than layers; if `schedule` is for other sizes, a cut point
            is no layer, or nothing fits `memory_limit`.

    Example:

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    >>> with strategy.scope():
    ...     model = keras.Sequential(
    ...         [keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))]
    ...     )
    ...     model = tfscale.PipelineModel(model, num_microbatches=4)
    ...     model.compile("adam", "mse")
    >>> x = keras.ops.ones((16, 8))
    >>> history = model.fit(x, x, verbose=0)
    """

    def __init__(
        self,
        model: keras.Model,
        num_microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: str | list[str] = "flops",
        recompute: bool = False,
        *,
        memory_limit: float | None = None,
        microbatch_size: int = 1,
    ):
        strategy = tf.distribute.get_strategy()
        _check(model, num_microbatches, strategy)
        schedule = get_schedule(
            schedule, len(strategy.device_rows[0]), num_microbatches
        )
        plan = make_plan(
            model,
            schedule,
            balance,
            recompute=recompute,
            memory_limit=memory_limit,
            microbatch_size=microbatch_size,
            measure=functools.partial(
                measure.measure_calls,
                device=strategy.device_rows[0][0],
                rows=microbatch_size,
            ),
        )
        placement.check_made_in_scope(plan.variables)
        super().__init__(name=model.name, dtype=model.dtype_policy)
        self.model = model
        self.output_names = plan.graph.functional.output_names
        self.built = True
        self._plan = plan
        self._programs = {}
        placement.move_variables(plan, strategy)
        num_ranks = strategy.extended.num_model_ranks
        if num_ranks > 1:
            if strategy.extended.sequence_parallel:
                sequence_model.prepare(plan.graph.functional, num_ranks)
            else:
                analysis.analyse(plan.graph.functional, num_ranks)

    @property
    def plan(self) -> Plan:
        """Stages, schedule and homes of variables."""
        return self._plan

    @property
    def programs(self) -> list[Program]:
        """The functions that were traced, one set for each kind of batch."""
        return [of_ranks[0] for of_ranks in self._programs.values()]

    def call(self, inputs, training=None, mask=None):
        """The model itself, without a pipeline."""
        return self.model(inputs, training=training, mask=mask)

    def compile(
        self,
        optimizer="rmsprop",
        loss=None,
        loss_weights=None,
        metrics=None,
        weighted_metrics=None,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=True,
    ):
        """See `keras.Model.compile`; to be called in the strategy's scope.

        With `jit_compile="auto"` XLA compiles the stages where Keras would
        have it compile the model on one device: on accelerators, if all
        layers can.
        """
        if tf.distribute.get_strategy() is not self.distribute_strategy:
            raise ValueError(
                "`compile` must be called in the scope of the strategy that "
                "the model was made in, because optimizer and metrics make "
                "variables. Received: a call outside. Put it, and what makes "
                "the optimizer, under `with strategy.scope():`."
            )
        if jit_compile == "auto":
            jit_compile = not run_eagerly and any(
                device.device_type != "CPU"
                for device in tf.config.list_physical_devices()
            )
        self._jit_stages = bool(
            jit_compile and _tf_internals.model_supports_jit(self.model)
        )
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,  # not the step, but its stages
            auto_scale_loss=auto_scale_loss,
        )
        # So that what is saved is a compiled model, with the same optimizer.
        self.model.compile(
            optimizer=self.optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            jit_compile=jit_compile,
            auto_scale_loss=False,
        )
        self._programs = {}

    def summary(self, *args, **kwargs):
        """See `keras.Model.summary`; `pipeline_summary` tells the stages."""
        self.model.summary(*args, **kwargs)

    def pipeline_summary(
        self, line_length=None, print_fn=None, microbatch_size=None
    ):
        """Prints the stages, and what to expect of the schedule.

        Args:
            line_length: See `keras.Model.summary`.
            print_fn: See `keras.Model.summary`.
            microbatch_size: Rows of a microbatch, for the memory of
                activations. Defaults to that of the constructor.
        """
        summary.print_summary(
            self._plan,
            self.distribute_strategy.device_rows,
            microbatch_size=microbatch_size,
            optimizer=getattr(self, "optimizer", None),
            line_length=line_length,
            print_fn=print_fn,
        )

    def timelines(self, x=None, y=None, sample_weight=None):
        """When each device does what: predicted and, given a batch, measured.

        Measuring takes some steps that change no variable.

        Args:
            x: Inputs of a batch, as `train_on_batch` takes them, or None.
            y: Targets of the batch.
            sample_weight: Weights of its rows.

        Returns:
            A dict of titles and spans for `tfscale.pipeline.as_text`,
            `as_chrome_trace` and `save_png`: times are in seconds if there is
            a batch, and else in forwards of a stage of mean cost.
        """
        if x is None:
            return measure.timelines(self._plan)
        self._assert_compile_called("timelines")
        data = (x, y, sample_weight)[: 2 + (sample_weight is not None)]
        with self.distribute_strategy.scope():
            self._symbolic_build(data_batch=data)
        measured = measure.measure_step(
            self._plan,
            lambda inputs, targets: self._program(inputs, targets, True),
            self.distribute_strategy,
            data,
        )
        return measure.timelines(self._plan, measured)

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Saves the plain Keras model, see `keras.Model.save`."""
        self.model.save(filepath, overwrite=overwrite, zipped=zipped, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves the weights of the plain model, see `keras.Model`."""
        self.model.save_weights(filepath, overwrite=overwrite, **kwargs)

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        """Loads weights of the plain model, see `keras.Model`."""
        self.model.load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def export(self, filepath, *args, **kwargs):
        """Exports the plain Keras model, see `keras.Model.export`."""
        self.model.export(filepath, *args, **kwargs)

    def get_config(self):
        """The configuration of the plain Keras model."""
        return self.model.get_config()

    def train_step(self, data):
        """One optimizer step on a batch; in replica context."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        scale = self.optimizer.scale_loss(tf.ones(()))
        step, inputs, result = self._run(
            x, (y, sample_weight), training=True, loss_scale=scale
        )
        penalty = self._add_penalties(result.gradients, scale)
        with contextlib.ExitStack() as stack:
            if not isinstance(
                self.optimizer, keras.optimizers.LossScaleOptimizer
            ):
                checked = tf.debugging.check_numerics(
                    step.all_sum(result.loss), failures.NOT_FINITE
                )
                stack.enter_context(tf.control_dependencies([checked]))
            step.assign(result.states)
            self._apply(result.gradients)
        return self._log(result, penalty, x, y, sample_weight, inputs)

    def test_step(self, data):
        """Loss and metrics of a batch; in replica context."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        step, inputs, result = self._run(x, (y, sample_weight), training=False)
        step.assign(result.states)
        penalty = self._add_penalties({}, 0.0)
        return self._log(result, penalty, x, y, sample_weight, inputs)

    def predict_step(self, data):
        """Predictions for a batch; in replica context."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        step, _, result = self._run(x, None, training=False)
        step.assign(result.states)
        return self._plan.graph.pack_outputs(result.outputs)

    def predict_on_batch(self, x):
        """See `keras.Model`, which would give all of it to every replica."""
        rows = len(keras.tree.flatten(x)[0])
        return self.predict(x, batch_size=rows, verbose=0)

    def make_train_function(self, force=False):
        """See `keras.Model`; the function is run without Grappler."""
        super().make_train_function(force)
        self.train_function = _outermost(self.train_function, self._plan.stages)
        return self.train_function

    def make_test_function(self, force=False):
        """See `keras.Model`; the function is run without Grappler."""
        super().make_test_function(force)
        self.test_function = _outermost(self.test_function, self._plan.stages)
        return self.test_function

    def make_predict_function(self, force=False):
        """See `keras.Model`; the function is run without Grappler."""
        super().make_predict_function(force)
        self.predict_function = _outermost(
            self.predict_function, self._plan.stages
        )
        return self.predict_function

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """See `keras.Model`; only if something is left to build.

        Keras takes a batch from an iterator made for this alone, in every
        `fit`. Letting go of an iterator may take as long as it has lived:
        tf.data's autotuner can miss the signal and sleep on.
        """
        parts = [*self._flatten_layers(), self._compile_metrics]
        parts += [self._compile_loss, getattr(self, "optimizer", None)]
        if not all(part is None or part.built for part in parts):
            super()._maybe_symbolic_build(iterator, data_batch)

    def _run(self, x, targets, *, training, loss_scale=1.0):
        """Runs a batch; returns the step, its flat inputs and its result."""
        inputs = self._plan.graph.flatten_inputs(x)
        program = self._program(inputs, targets, training)
        actions = self._plan.schedule.order()
        if not training:
            actions = (action for action in actions if action.kind == "F")
        flat = keras.tree.flatten(targets)
        step = ReplicaStep(self._plan, program, self.distribute_strategy)
        result = step.run(
            inputs,
            [tensor for tensor in flat if tensor is not None],
            actions=actions,
            loss_scale=loss_scale,
            training=training,
        )
        return step, inputs, result

    def _program(self, inputs, targets, training):
        """The model's functions for batches like this, traced once."""
        specs = keras.tree.map_structure(
            lambda x: None if x is None else (tuple(x.shape), x.dtype),
            (inputs, targets),
        )
        trainable = [variable.trainable for variable in self._plan.variables]
        key = repr((specs, training, trainable))
        if key not in self._programs:
            self._programs[key] = trace_program(
                self._plan,
                inputs,
                targets,
                training=training,
                compile_loss=self._compile_loss,
                jit_compile=getattr(self, "_jit_stages", False),
                devices=self.distribute_strategy.device_grid,
            )
        return self._programs[key][collectives.rank()]

    def _add_penalties(self, gradients, scale):
        """Adds weight regularisers' gradients, returns their sum."""
        total = tf.zeros(())
        for number, variable in enumerate(self._plan.variables):
            if variable.regularizer is None or not variable.trainable:
                continue
            with tf.GradientTape() as tape:
                value = tf.convert_to_tensor(variable)
                tape.watch(value)
                penalty = variable.regularizer(value)
            total += tf.cast(penalty, tf.float32)
            if number in gradients:
                gradient = tape.gradient(penalty, value)
                dim = rules.split_dim(variable)
                if dim is not None:
                    gradient = collectives.own_part(gradient, dim)
                slot_parts = self.distribute_strategy.extended.slot_parts
                gradient = slot_parts.cut(gradient, variable)
                gradients[number] += gradient * tf.cast(scale, gradient.dtype)
        return total

    def _apply(self, gradients):
        numbers = self._plan.numbers
        variables = self.trainable_variables
        extended = self.distribute_strategy.extended
        with placement.on_device_of_inputs(), extended.reduced_gradients():
            self.optimizer.apply(
                [gradients.get(numbers.get(id(v))) for v in variables],
                variables,
            )

    def _log(self, result, penalty, x, y, sample_weight, inputs):
        rows = tf.shape(inputs[0])[0]
        self._loss_tracker.update_state(
            result.loss + penalty, sample_weight=rows
        )
        if self._compile_loss is not None:
            # As in Keras, batches of unknown size count equally here.
            weight = result.share if inputs[0].shape[0] is None else rows
            for metric, loss in zip(self._compile_loss.metrics, result.losses):
                metric.update_state(loss, sample_weight=weight)
        y_pred = self._plan.graph.pack_outputs(result.outputs)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _outermost(function, stages):
    """What Keras calls once per step, or per several steps."""
    if getattr(function, "is_outermost", False):
        return function

    def call(iterator):
        with failures.explained(stages), no_grappler():
            return function(iterator)

    call.is_outermost = True
    return call


def _check(model, num_microbatches, strategy):
    if not isinstance(strategy, MeshStrategy):
        raise ValueError(
            "`PipelineModel` must be made in the scope of a "
            f"`tfscale.MeshStrategy`. Received: {type(strategy).__name__}. "
            "Use `with strategy.scope():`."
        )
    if isinstance(model, keras.Model) and model.compiled:
        raise ValueError(
            "A model must be wrapped before it is compiled, because its "
            "optimizer belongs to the pipeline. Received: the compiled model "
            f"{model.name!r}. Call `compile` on the `PipelineModel`; load a "
            "saved model with `compile=False`."
        )
    if num_microbatches < 1:
        raise ValueError(
            "`num_microbatches` must be at least 1. Received: "
            f"num_microbatches={num_microbatches}."
        )
