"""A Keras model that trains as a pipeline of stages."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.collectives.device_names import are_accelerators
from tfscale.pipeline import summary
from tfscale.pipeline.running import checks
from tfscale.pipeline.running import measure
from tfscale.pipeline.running import placement
from tfscale.pipeline.running import window
from tfscale.pipeline.running.trainer import PipelineTrainer
from tfscale.pipeline.stages.memory import check_older_weights
from tfscale.pipeline.stages.plan import make_plan
from tfscale.schedules.named_schedules import get_schedule
from tfscale.schedules.named_schedules import of_window
from tfscale.schedules.schedule import Schedule
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel.sequence_parallel import sequence_model

# FLOPs of a CPU, and of an accelerator, while it sends a byte to its neighbor:
# an A100 800, an H100 1,700, in 16 bits; copies between cores are fast.
_FLOPS_PER_BYTE = 10, 1000


# A model saved as this class loads as the plain model, see wrapped_model.py.
@keras.saving.register_keras_serializable(package="tfscale")
class PipelineModel(PipelineTrainer):
    """Trains a Keras model over the pipeline axis of a mesh.

    The layers are cut into stages, each on its own device; a batch is cut
    into microbatches, which go through the stages one after the other
    (Huang et al. 2019, "GPipe"). `compile`, `fit`, `evaluate`, `predict` and
    the `*_on_batch` methods are those of Keras and give the numbers of one
    device: losses, gradients, metrics and moving statistics are those of the
    whole batch, however it is divided. The plain model is saved.

    Three things differ from one device, as in every pipeline:
    `BatchNormalization` normalizes each microbatch by itself in training (its
    moving statistics are those of the whole batch, updated once per step);
    random layers draw other numbers, since they draw once per microbatch (and
    equal ones on all data replicas, as in Keras under any strategy); and what
    a layer gives to `add_loss` is taken for a mean over the rows.

    A `compute_loss` of the model's own, or of a subclass of this class, is
    called for each microbatch. Losses given to `compile` may be scaled in it
    and added up, as on one device; what else it returns is taken for a mean
    over the rows. It sees the outputs, the targets and the inputs; it can use
    no layers of other stages than the last.

    A loss that is not finite ends training with a `FloatingPointError`, before
    any variable is changed; not so with a `LossScaleOptimizer`, which skips
    such steps. With `jit_compile="auto"` XLA compiles the stages where Keras
    would have it compile the model on one device: on accelerators, if all
    layers can and there are no model ranks. With `jit_compile=True` and model
    ranks it compiles what lies between their exchanges. Calling the model
    itself, `model(x)`, runs without a pipeline.

    Args:
        model: A built Sequential or functional model, made in the scope of
            the strategy. Nested models are opened up; layers may be called
            twice (tied weights) and be of any kind. If it is compiled, the
            pipeline is too, with the same optimizer, slots and all: so a
            model that was saved in training trains on.
        num_microbatches: How many microbatches a (per-replica) batch is cut
            into. Need not divide it. The bubble, during which devices wait,
            is `(S - 1) / (num_microbatches + S - 1)` of a step for S stages.
        schedule: `"1f1b"`, `"gpipe"`, `"interleaved"`, `"looped_bfs"`,
            `"zb_h1"`, `"zb_h2"`, `"zb1p"`, `"zb_v"`, `"dualpipev"`, or a
            `tfscale.schedules.Schedule`. `"auto"` takes the fastest for the
            FLOPs, or the measured times, of the stages that needs no more
            memory than 1F1B.
            `"pipedream"` and `"pipedream_vertical_sync"` (Narayanan et al.
            2019, section 3.3) update weights without a flush, in windows of
            `steps_per_execution` batches: not equal to one device.
        balance: How to cut: `"flops"`, `"params"` or `"time"` make the dearest
            stage as cheap as can be; a list names the layers that begin
            stages 1, 2, ...
        recompute: Whether to keep only the inputs of stages and compute the
            rest again in the backward pass, with the same dropout masks.
        memory_limit: Bytes that each device may take, or None. Cuts are then
            chosen among those that fit.
        microbatch_size: Rows of a microbatch, for estimates of memory, for
            `balance="time"`, and for what an exchange of shared weights costs.
        stages_per_device: Stages of each device, for schedules that take
            several. Defaults to what `schedule` usually has: 2 for
            `"interleaved"`, `"looped_bfs"`, `"zb1p"`, `"zb_v"` and
            `"dualpipev"`, else 1.

    Raises:
        TypeError: If `model` is no Keras model, or another argument is of the
            wrong type.
        ValueError: If not in the scope of a `MeshStrategy`; if the model was
            made outside it, is not built, or has a `call` or `train_step` of
            its own; if `num_microbatches` is less than 1; if there are more
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
        stages_per_device: int | None = None,
    ):
        strategy = tf.distribute.get_strategy()
        checks.check_strategy(strategy)
        checks.check_arguments(
            num_microbatches,
            recompute,
            memory_limit,
            microbatch_size,
            stages_per_device,
        )
        if isinstance(model, keras.Model):
            checks.check_steps(model)
        devices = strategy.device_rows[0]
        is_accelerator = "CPU" not in devices[0]
        make_this_plan = functools.partial(
            make_plan,
            model,
            get_schedule(
                schedule, len(devices), num_microbatches, stages_per_device
            ),
            balance,
            recompute=recompute,
            memory_limit=memory_limit,
            microbatch_size=microbatch_size,
            measure=functools.partial(
                measure.measure_calls, device=devices[0], rows=microbatch_size
            ),
            choose_schedule=schedule == "auto",
            flops_per_byte=_FLOPS_PER_BYTE[is_accelerator],
            speeds=strategy.extended.config.stage_speeds,
        )
        plan = make_this_plan()
        checks.check_made_in_scope(plan.variables)
        super().__init__(model, plan)
        self._make_plan = make_this_plan
        self._trained_when_cut = _ids(model.trainable_variables)
        self.output_names = plan.graph.functional.output_names
        self.built = True
        placement.move_variables(plan, strategy)
        self._analyze()
        if model.compiled:
            self.compile(**_compile_arguments(model))

    def _compile_in_scope(self, *, run_eagerly, jit_compile, **arguments):
        num_ranks = self.distribute_strategy.extended.num_model_ranks
        if num_ranks > 1 and jit_compile == "auto":
            jit_compile = False
        if jit_compile == "auto":
            rows = self.distribute_strategy.device_rows
            jit_compile = not run_eagerly and are_accelerators(rows)
        keras.Model.compile(
            self,
            **arguments,
            run_eagerly=run_eagerly,
            jit_compile=False,  # not the step, but its stages
        )
        if self._plan.schedule.has_updates:
            self._plan_windows()
        # So that what is saved is a compiled model, with the same optimizer.
        # Keras' own method: the model's may set what it was given before.
        plain = {
            **arguments,
            "optimizer": self.optimizer,
            "steps_per_execution": 1,
            "auto_scale_loss": False,
        }
        keras.Model.compile(self.model, **plain, jit_compile=jit_compile)
        # Keras has set this back if layers do not support XLA.
        is_compiled = bool(jit_compile) and self.model.jit_compile
        self.jit_compile = is_compiled
        self._has_clusters = is_compiled and num_ranks > 1
        self._programs = self._compiled_programs(
            is_compiled and not self._has_clusters
        )

    def make_train_function(self, force: bool = False) -> Any:
        """See `keras.Model`; cuts anew if other variables are trainable now."""
        if force or self.train_function is None:
            trained = _ids(self.model.trainable_variables)
            if trained != self._trained_when_cut:
                self._cut_anew()
        return super().make_train_function(force)

    def _follow_variables(self):
        """Cuts anew if layers have other variables: quantized ones have."""
        if checks.changed_variables(self._plan):
            self._cut_anew()
            with self.distribute_strategy.scope():
                self._analyze()

    def _cut_anew(self):
        """Frozen layers cost less; what a stage gets is moved to its device."""
        before, self._plan = self._plan, self._make_plan()
        if self._plan.schedule.has_updates:
            self._plan_windows()
        self._trained_when_cut = _ids(self.model.trainable_variables)
        self._programs = dataclasses.replace(self._programs, plan=self._plan)
        self.train_function = self.test_function = self.predict_function = None
        strategy = self.distribute_strategy
        with strategy.scope():
            is_moved = placement.move_variables(self._plan, strategy, before)
            # None before `compile`.
            optimizer = getattr(self, "optimizer", None)
            if is_moved and optimizer and optimizer.built:
                attributes.take_state(optimizer, _moved(optimizer))

    def _analyze(self):
        """Decides what stays sharded between the layers, on model ranks."""
        extended = self.distribute_strategy.extended
        model, num_ranks = self._plan.graph.functional, extended.num_model_ranks
        if num_ranks > 1:
            if extended.sequence_parallel:
                sequence_model.prepare(model, num_ranks)
            else:
                analysis.analyze(model, num_ranks)

    def _plan_windows(self):
        """Plans for the batches of an execution, with a flush at its end."""
        strategy = self.distribute_strategy
        window.check(self._plan, strategy, self.optimizer)
        schedule = of_window(self._plan.schedule, self.steps_per_execution)
        self._plan = dataclasses.replace(self._plan, schedule=schedule)
        check_older_weights(self._plan)
        self._counters = window.make_counters(self._plan, strategy)

    def pipeline_summary(
        self,
        line_length: int | None = None,
        print_fn: Callable[[str], None] | None = None,
    ) -> None:
        """Prints the stages, and what to expect of the schedule.

        Args:
            line_length: See `keras.Model.summary`.
            print_fn: See `keras.Model.summary`.
        """
        summary.print_summary(
            self._plan,
            self.distribute_strategy.device_rows,
            optimizer=getattr(self, "optimizer", None),
            line_length=line_length,
            print_fn=print_fn,
        )

    def timelines(
        self, x: Any = None, y: Any = None, sample_weight: Any = None
    ) -> dict[str, list[Any]]:
        """When each device does what: predicted and, given a batch, measured.

        Measuring takes some steps that change no variable.

        Args:
            x: Inputs of a batch, as `train_on_batch` takes them, or None.
            y: Targets of the batch.
            sample_weight: Weights of its rows.

        Returns:
            A dict of titles and spans for `tfscale.schedules.as_text`,
            `as_chrome_trace` and `save_png`: times are in seconds if there is
            a batch, and else in forwards of a stage of mean cost.
        """
        if x is None:
            return measure.timelines(self._plan)
        if self._plan.schedule.has_updates:
            raise ValueError(
                "A measured step must change no variable. Received: "
                f"schedule={self._plan.schedule.name!r}, whose stages update "
                "weights. Call `timelines()`, which predicts, or measure "
                "'1f1b'."
            )
        if not self.compiled:
            raise ValueError(
                "A measured step needs the losses of `compile`. Received: "
                f"{self.name!r}, which is not compiled. Call `compile` before "
                "`timelines`."
            )
        data = (x, y, sample_weight)[: 2 + (sample_weight is not None)]
        with self.distribute_strategy.scope():
            self._symbolic_build(data_batch=data)
        measured = measure.measure_step(
            self._measured_step, self._plan, self.distribute_strategy, data
        )
        return measure.timelines(self._plan, measured)


def _ids(variables):
    return {id(variable) for variable in variables}


def _compile_arguments(model: keras.Model) -> dict:
    """An optimizer's slots are moved to the devices of the variables."""
    arguments = attributes.compile_arguments(model)
    if not arguments["jit_compile"]:
        # As Keras does for "auto" under a strategy.
        arguments["jit_compile"] = "auto"
    arguments["optimizer"] = _moved(model.optimizer)
    arguments["auto_scale_loss"] = False  # it has been, if it was to be
    return arguments


def _moved(optimizer):
    if optimizer is None or not optimizer.built:
        return optimizer
    moved = optimizer.__class__.from_config(optimizer.get_config())
    # Not those that are trainable now: layers may have been frozen since.
    moved.build(attributes.optimized_variables(optimizer))
    for new, old in zip(moved.variables, optimizer.variables, strict=True):
        new.assign(old.numpy())
    return moved
