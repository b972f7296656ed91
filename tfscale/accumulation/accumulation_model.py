"""A model whose `train_step` runs in microbatches."""

import contextlib
import functools

import keras

from tfscale.accumulation.loop import run_microbatches
from tfscale.accumulation.replica_step import ReplicaStep
from tfscale.adapters.function import for_any_rows
from tfscale.adapters.mirrored_strategy import adapt_strategy
from tfscale.adapters.model import adapt_accumulated_model
from tfscale.mesh.gradient_noise import GradientNoise
from tfscale.step import batch_norm
from tfscale.step.whole import adapt_to_shards


class Accumulation:
    """How the steps of an adapted model, which is built, run in microbatches.

    `noise` measures gradients of microbatches, or is None; `plain` is the
    earlier train function, `function` its replacement.
    """

    def __init__(
        self,
        model: keras.Model,
        num_microbatches: int,
        noise: GradientNoise | None,
    ):
        self.num_microbatches = num_microbatches
        self.noise = noise
        self.is_running = False
        self.plain = model.train_function
        with self._running(model):
            model.make_train_function(force=True)
        function = for_any_rows(model.train_function)
        model.train_function = self.plain

        @functools.wraps(function)
        def run(iterator):
            with self._running(model):
                return function(iterator)

        self.function = run

    @contextlib.contextmanager
    def _running(self, model):
        """Within it, steps of the model run in microbatches."""
        if model.tfscale_accumulation is not self:
            model.tfscale_accumulation = self
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def train_step(self, model, train_step, data):
        """Runs the model's `train_step`; in replica context."""
        with batch_norm.noting() as noting:
            step = ReplicaStep(
                model, train_step, data, self.num_microbatches, self.noise
            )
            run_microbatches(step, self.num_microbatches)
            return step.end(noting)


def adapt(model: keras.Model) -> None:
    """Has a compiled model and its parts do what their step asks for.

    Without a step in microbatches they do what they did before.
    """
    adapt_strategy(model.distribute_strategy)
    adapt_accumulated_model(model)
    adapt_to_shards(model)
