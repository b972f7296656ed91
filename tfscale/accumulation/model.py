"""A model whose `train_step` runs in microbatches."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale import in_place
from tfscale.accumulation import checks
from tfscale.accumulation.gradient_capture import CapturingOptimizer
from tfscale.accumulation.loop import run_microbatches
from tfscale.accumulation.microbatches import GivenNumber
from tfscale.accumulation.microbatches import SmallestNumber
from tfscale.accumulation.mirrored import MirroredAsOne
from tfscale.accumulation.replica_step import ReplicaStep
from tfscale.distribute.optimizers.gradient_noise import GradientNoise
from tfscale.whole_batch import batch_norm
from tfscale.whole_batch import model_loss


class Accumulation:
    """How the steps of a model run in microbatches.

    Args:
        microbatches: How many microbatches a batch is cut into.
        noise: What looks at the gradients of microbatches, or None.
        plain: The train function of the model before.

    Attributes:
        function: What the model has as its `train_function` meanwhile.
    """

    def __init__(
        self,
        microbatches: GivenNumber | SmallestNumber,
        noise: GradientNoise | None,
        plain: Callable[[Any], Any] | None,
    ):
        self.microbatches = microbatches
        self.noise = noise
        self.plain = plain
        self.function: Callable[[Any], Any] | None = None


class AccumulatingModel(in_place.Mixin):
    """Comes before the class of a model whose steps run in microbatches.

    Of one class for all models and fits: classes, and the functions that were
    traced with them, are kept by whoever has cached them.
    """

    tfscale_accumulation: Accumulation

    def train_step(self, data):
        """See `keras.Model.train_step`; in replica context."""
        accumulation = self.tfscale_accumulation
        microbatches = accumulation.microbatches
        with batch_norm.noting() as noting:
            step = ReplicaStep(
                self,
                super().train_step,
                data,
                microbatches.number,
                accumulation.noise,
            )
            run_microbatches(step, microbatches)
            return step.end(noting)


@contextlib.contextmanager
def accumulating(
    model: keras.Model, accumulation: Accumulation
) -> Iterator[None]:
    """Within it, the steps of a model run in microbatches.

    Args:
        model: A compiled Keras model.
        accumulation: How they do; it is kept with the model.
    """
    if accumulation_of(model) is not accumulation:
        model.tfscale_accumulation = accumulation
    with contextlib.ExitStack() as stack:
        strategy = model.distribute_strategy
        if type(strategy) is tf.distribute.MirroredStrategy:
            as_one = in_place.putting(strategy.extended, MirroredAsOne)
            stack.enter_context(as_one)
        stack.enter_context(model_loss.of_whole_batch(model))
        stack.enter_context(in_place.putting(model, AccumulatingModel))
        for optimizer in checks.optimizers_of(model):
            stack.enter_context(in_place.putting(optimizer, CapturingOptimizer))
        batch_norm.adapt(_internals.flatten_layers(model))
        yield


def accumulation_of(model: keras.Model) -> Accumulation | None:
    """How a model accumulated last, if it ever did."""
    return getattr(model, "tfscale_accumulation", None)


def accumulation_for(
    model: keras.Model,
    microbatches: GivenNumber | SmallestNumber,
    noise: GradientNoise | None,
) -> Accumulation:
    """How a model accumulates, with a function for it.

    Args:
        model: A compiled Keras model, of which all variables are made.
        microbatches: How many microbatches a batch is cut into.
        noise: What looks at the gradients of microbatches, or None.
    """
    before = model.train_function
    accumulation = Accumulation(microbatches, noise, before)
    with accumulating(model, accumulation):
        model.make_train_function(force=True)
    function, model.train_function = model.train_function, before

    @functools.wraps(function)
    def run(iterator):
        with accumulating(model, accumulation):
            return microbatches.run(lambda: function(iterator))

    accumulation.function = run
    return accumulation
