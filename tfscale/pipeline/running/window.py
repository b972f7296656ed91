"""Windows of batches, in which stages update their weights (PipeDream).

`steps_per_execution` batches are one schedule without a flush:

    device 0   F0.0 ─► F0.1 ─► B0.0 ─► U0.0 ─► F0.2 ─► ...
    device 1           F1.0 ─► B1.0 ─► U1.0 ─► F1.1 ─► ...

A stage's weights after U0.0 are given to the microbatches whose version they
are (`Schedule.version`), for the forward and the backward. A value that is
still needed keeps its buffer: TensorFlow writes the next one elsewhere.

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN
Training (2019), section 3.3.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tfscale.adapters.optimizer import apply_sums
from tfscale.adapters.optimizer import with_iterations
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.running.batch import Batch
from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.running.step import PipelineStep
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import failures
from tfscale.pipeline.tracing import keys
from tfscale.schedules.action import Action
from tfscale.schedules.schedule import Schedule
from tfscale.step.batch_norm import sum_over_replicas

# Optimizers with states that are of no single variable.
_OF_ALL = (
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.MultiOptimizer,
    keras.optimizers.Nadam,
)


class Window(NamedTuple):
    """The argument of a train function in place of a batch."""

    batches: tuple[Any, ...]


def in_windows(function: Callable, size: int) -> Callable:
    """Has a train function draw windows; the last of an epoch may be short."""

    @functools.wraps(function)
    def call(iterator):
        batches = tuple(_first(iterator, size))
        if not batches:
            raise StopIteration
        return function(iter([Window(batches)]))

    return call


def _first(iterator, count) -> Iterator[Any]:
    for _ in range(count):
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def with_equal_shapes(batches) -> list[Any]:
    """Batches with `None` where sizes differ: all run the same functions."""
    flat = [keras.tree.flatten(batch) for batch in batches]
    result = []
    for tensors in flat:
        same = []
        for tensor, *others in zip(tensors, *flat, strict=True):
            if tensor is not None:
                sizes = zip(*(x.shape for x in others), strict=True)
                shape = [s[0] if len({*s}) == 1 else None for s in sizes]
                tensor = tf.compat.v1.placeholder_with_default(tensor, shape)
            same.append(tensor)
        result.append(keras.tree.pack_sequence_as(batches[0], same))
    return result


@dataclasses.dataclass
class StageUpdates:
    """Updates the stages of one replica in a window.

    `add_penalties` adds gradients of weight regularizers, given values of the
    weights, and returns their sum: `penalties` has these, of each batch.
    `functions` update each stage, by its number.
    """

    step: PipelineStep
    schedule: Schedule
    optimizer: keras.Optimizer
    counters: "Counters"
    add_penalties: Callable[..., tf.Tensor]
    penalties: list[tf.Tensor]
    functions: dict[int, Callable] = dataclasses.field(default_factory=dict)

    def __call__(
        self, tensors: Tensors, batches: list[Batch], action: Action
    ) -> tf.Tensor:
        """Updates a stage by the gradient of a batch."""
        plan, batch = self.step.plan, batches[action.microbatch]
        device = self.step.devices[action.stage]
        trainable = plan.stages[action.stage].trainable
        numbers = [plan.numbers[id(variable)] for variable in trainable]
        gradients = {}
        for number in numbers:
            key = keys.GradientSum(action.stage, number)
            if key in tensors.sums:  # the loss depends on the variable
                gradients[number] = tensors.sums[key]
                tensors.sums[key] = tf.zeros_like(gradients[number])
        # As in the forward of the batch.
        used = tensors.shared | batch.tensors.microbatches[0]
        with tf.device(device):
            gradients = self.step.sum_gradients(gradients)
            self.penalties[action.microbatch] += self.add_penalties(
                gradients, {n: used[keys.Param(n)] for n in numbers}
            )
        update = self.functions.get(action.stage)
        if update is None:
            update = functools.partial(self._apply, action.stage)
            if not self.step.strategy.extended.has_several_replicas:
                # Traced once. Replicas exchange nothing in a function.
                update = tf.function(update, autograph=False)
            self.functions[action.stage] = update
        # Results of a function are where it is called.
        checked = self._checked(batch)
        with tf.device(device), tf.control_dependencies([checked]):
            new = update(gradients)
        values = {keys.Param(number): value for number, value in new.items()}
        done = action.microbatch + 1
        for later in range(done, len(batches)):
            if self.schedule.version(action.stage, later) == done:
                for microbatch in batches[later].tensors.microbatches:
                    microbatch.update(values)
        with tf.device(device), tf.control_dependencies(list(new.values())):
            return tf.zeros(())

    def _checked(self, batch):
        """The loss of a batch, or an error before it updates anything."""
        with tf.device(self.step.devices[-1]):
            loss, _ = batch.total()
            (loss,) = sum_over_replicas([loss])
            return tf.debugging.check_numerics(loss, failures.NOT_FINITE)

    def _apply(self, stage, gradients):
        variables = [self.step.plan.variables[number] for number in gradients]
        optimizer = with_iterations(
            self.optimizer, self.counters.of_stages[stage]
        )
        with tf.device(self.step.devices[stage]):
            apply_sums(optimizer, list(gradients.values()), variables)
        new = {}
        for number, variable in zip(gradients, variables):
            component = self.step.component(variable)
            with tf.device(component.device):
                new[number] = component.read_value()
        return new


@dataclasses.dataclass(frozen=True)
class Counters:
    """For each stage its `iterations`; no list, which Keras would save."""

    of_stages: tuple[keras.Variable, ...]

    def set(self, iterations: tf.Tensor) -> None:
        """Sets those of all stages."""
        for counter in self.of_stages:
            counter.assign(iterations)


def make_counters(plan: PipelinePlan, strategy: MeshStrategy) -> Counters:
    """The counters of a model, on the devices of its stages."""
    made = []
    for rank in plan.schedule.stage_devices:
        creator = strategy.extended.variable_creator
        with strategy.scope(), creator.placed_on(rank):
            made.append(keras.Variable(0, dtype="int64", trainable=False))
    return Counters(tuple(made))


def check(plan: PipelinePlan, strategy: MeshStrategy, optimizer) -> None:
    """Refuses what needs the gradients of all stages at once."""
    shared = [v.path for v in plan.variables if len(plan.users(v)) > 1]
    for is_there, received in (
        (strategy.extended.num_model_ranks > 1, "a mesh with a model axis"),
        (shared, f"{shared[:1]} in several stages"),
        (isinstance(optimizer, _OF_ALL), f"a {type(optimizer).__name__}"),
        *(
            (getattr(optimizer, name, None), f"an optimizer with {name}")
            for name in (
                "global_clipnorm",
                "use_ema",
                "gradient_accumulation_steps",
            )
        ),
    ):
        if is_there:
            raise ValueError(
                "In an asynchronous pipeline each stage updates its own "
                "weights, before other stages have their gradients. Received: "
                f"schedule={plan.schedule.name!r} and {received}. Leave it "
                "out, or use '1f1b'."
            )
