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
from tfscale.accumulation.loop import run_microbatches
from tfscale.accumulation.microbatches import GivenNumber
from tfscale.accumulation.microbatches import SmallestNumber
from tfscale.accumulation.mirrored import MirroredAsOne
from tfscale.accumulation.replica_step import ReplicaStep
from tfscale.accumulation.taking import TakenOptimizer
from tfscale.distribute.gradient_noise import GradientNoise
from tfscale.whole_batch import batch_norm
from tfscale.whole_batch import model_loss


def accumulating_mixin(
    microbatches: GivenNumber | SmallestNumber, noise: GradientNoise | None
) -> type:
    """What is put in front of the class of a model.

    Args:
        microbatches: How many microbatches a batch is cut into.
        noise: What looks at the gradients of microbatches, or None.
    """

    class AccumulatingModel(in_place.Mixin):
        def train_step(self, data):
            """See `keras.Model.train_step`; in replica context."""
            with batch_norm.noting() as noting:
                step = ReplicaStep(
                    self, super().train_step, data, microbatches.number, noise
                )
                run_microbatches(step, microbatches)
                return step.end(noting)

    return AccumulatingModel


@contextlib.contextmanager
def accumulating(model: keras.Model, mixin: type) -> Iterator[None]:
    """Within it, the steps of a model run in microbatches.

    Args:
        model: A compiled Keras model.
        mixin: See `accumulating_mixin`.
    """
    with contextlib.ExitStack() as stack:
        strategy = model.distribute_strategy
        if type(strategy) is tf.distribute.MirroredStrategy:
            as_one = in_place.putting(strategy.extended, MirroredAsOne)
            stack.enter_context(as_one)
        stack.enter_context(model_loss.of_whole_batch(model))
        stack.enter_context(in_place.putting(model, mixin))
        for optimizer in checks.optimizers_of(model):
            stack.enter_context(in_place.putting(optimizer, TakenOptimizer))
        for layer in _internals.flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                noting = batch_norm.ReplicaBatchNormalization
                stack.enter_context(in_place.putting(layer, noting))
        yield


def accumulating_function(
    model: keras.Model,
    microbatches: GivenNumber | SmallestNumber,
    noise: GradientNoise | None,
) -> Callable[[Any], Any]:
    """What a model has as its `train_function` meanwhile.

    Args:
        model: A compiled Keras model, of which all variables are made.
        microbatches: How many microbatches a batch is cut into.
        noise: What looks at the gradients of microbatches, or None.
    """
    mixin = accumulating_mixin(microbatches, noise)
    before = model.train_function
    with accumulating(model, mixin):
        model.make_train_function(force=True)
    function, model.train_function = model.train_function, before

    @functools.wraps(function)
    def run(iterator):
        with accumulating(model, mixin):
            return microbatches.run(lambda: function(iterator))

    return run
