"""A model whose `train_step` runs in microbatches."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.adapters.metric import adapt_metrics
from tfscale.adapters.mirrored_strategy import adapt_strategy
from tfscale.adapters.model import adapt_accumulated_model
from tfscale.adapters.optimizer import adapt_capturing
from tfscale.graphs.noting_scope import NotingScope
from tfscale.mesh.gradient_noise import GradientNoise
from tfscale.step import batch_norm
from tfscale.step import step_context
from tfscale.step.runners import checks
from tfscale.step.runners.gradient_capture import GradientCapture
from tfscale.step.runners.loop import GivenNumber
from tfscale.step.runners.loop import GivenRows
from tfscale.step.runners.loop import run_microbatches
from tfscale.step.runners.replica_step import ReplicaStep
from tfscale.step.runners.whole import adapt_to_shards


class Accumulation:
    """How the steps of a model run in microbatches.

    `noise` measures gradients of microbatches, or is None; `plain` is the
    earlier train function, `function` its replacement.
    """

    def __init__(
        self,
        microbatches: GivenNumber | GivenRows,
        noise: GradientNoise | None,
        plain: Callable[[Any], Any] | None,
    ):
        self.microbatches = microbatches
        self.noise = noise
        self.plain = plain
        self.function: Callable[[Any], Any] | None = None
        self.is_running = False

    def train_step(self, model, train_step, data):
        """Runs the model's `train_step`; in replica context."""
        with batch_norm.noting() as noting:
            step = ReplicaStep(
                model, train_step, data, self.microbatches.number, self.noise
            )
            run_microbatches(step, self.microbatches)
            return step.end(noting)


def adapt(model: keras.Model) -> None:
    """Has a compiled model and its parts do what their step asks for.

    Without a step in microbatches they do what they did before.
    """
    adapt_strategy(model.distribute_strategy)
    adapt_accumulated_model(model)
    adapt_to_shards(model)
    for optimizer in checks.optimizers_of(model):
        adapt_capturing(optimizer)
    adapt_metrics(model.metrics, are_on_replicas=False)


@contextlib.contextmanager
def accumulating(
    model: keras.Model, accumulation: Accumulation
) -> Iterator[None]:
    """Within it, the steps of an adapted model run in microbatches."""
    if accumulation_of(model) is not accumulation:
        model.tfscale_accumulation = accumulation
    was_running, accumulation.is_running = accumulation.is_running, True
    try:
        yield
    finally:
        accumulation.is_running = was_running


def gradients_of_step(model: keras.Model, data: Any) -> list[tf.Tensor]:
    """The gradients of an adapted model's step, in a graph.

    No variable is changed.
    """
    capture = GradientCapture(model.optimizer)
    with (
        NotingScope(collect_losses=True),
        step_context.within(gradient_capture=capture),
    ):
        model.train_step(data)
    return [x for x in capture.gradients if x is not None]


def accumulation_of(model: keras.Model) -> Accumulation | None:
    """The last accumulation of a model, if there was one."""
    return getattr(model, "tfscale_accumulation", None)


def accumulation_for(
    model: keras.Model,
    microbatches: GivenNumber | GivenRows,
    noise: GradientNoise | None,
) -> Accumulation:
    """The accumulation of an adapted model, which is built."""
    before = model.train_function
    accumulation = Accumulation(microbatches, noise, before)
    with accumulating(model, accumulation):
        model.make_train_function(force=True)
    function, model.train_function = model.train_function, before

    @functools.wraps(function)
    def run(iterator):
        with accumulating(model, accumulation):
            return function(iterator)

    accumulation.function = run
    return accumulation
