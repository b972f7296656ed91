"""Trains a model with batches that are cut into microbatches."""

import keras

from tfscale._internals import fitting
from tfscale.accumulation import checks
from tfscale.accumulation.accumulation_model import Accumulation
from tfscale.accumulation.accumulation_model import adapt
from tfscale.callbacks.gradient_noise_scale import GradientNoiseScale
from tfscale.fit.fit import Fit
from tfscale.fit.fit import FitScopedFunction
from tfscale.fit.fit import Logs
from tfscale.integers import check_integer
from tfscale.mesh.models import without_call


class GradientAccumulation(keras.callbacks.Callback):
    """Cuts each batch into microbatches, with one update for all of them.

    For any Keras model, also one with a custom `call`, `compute_loss` or
    `train_step`: a batch needs the memory of a microbatch, and the update is
    that of the whole batch, for all masks, sample weights, batch sizes and
    reductions. So clipping, schedules, averages and `optimizer.iterations`
    count batches, and replicas sum their gradients once per batch.

    As in every accumulation, `BatchNormalization` normalizes each microbatch
    by itself (its moving statistics are those of the batch, updated once), and
    random layers draw anew for each. A loss of `add_loss`, of a custom
    `compute_loss`, or of a `train_step` without it counts as a mean over the
    rows. The results of a `train_step` are averaged by rows, except results of
    metrics; it changes other variables in every microbatch.

    It works without a strategy, under `tfscale.MeshStrategy`, and under
    `tf.distribute.MirroredStrategy` but for clipping and loss scaling, which
    come there before the sum over replicas. When `fit` ends, also by an
    exception, the model trains as it did before.

    Args:
        num_microbatches: How many microbatches a batch (of each replica) is
            cut into, an int. Need not divide it. A last batch of fewer rows
            has as many as rows.

    Raises:
        TypeError: If `num_microbatches` is no int. When `fit` begins, if the
            strategy is another one.
        ValueError: If `num_microbatches` is less than 1. When `fit` begins, if
            the model is a `PipelineModel`, if the optimizer accumulates too
            or clips under `MirroredStrategy`, or if all batches have fewer
            rows than microbatches. In the first step, before any variable
            is changed: if `train_step` does not call the optimizer once.

    Source: Huang et al., GPipe (2019), section 2.2: "micro-batches".

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> accumulation = GradientAccumulation(num_microbatches=4)
    >>> history = model.fit(
    ...     x, y, batch_size=8, callbacks=[accumulation], verbose=0
    ... )
    >>> int(model.optimizer.iterations.numpy())
    1
    """

    def __init__(self, num_microbatches: int):
        super().__init__()
        check_integer("num_microbatches", num_microbatches)
        self.num_microbatches = num_microbatches
        self._accumulation: Accumulation | None = None
        self._function: FitScopedFunction | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """See `keras.callbacks.Callback`."""
        model = self.model
        workers = getattr(model.distribute_strategy.extended, "workers", None)
        if workers is not None:
            workers.coordination.check_same(
                "accumulation", f"num_microbatches={self.num_microbatches!r}"
            )
        if self.num_microbatches == 1:
            return
        checks.check(model)
        fit = Fit(model)
        # No variable can be created in the loop.
        spec = fitting.element_spec_of(fit.epochs)
        checks.check_rows(spec, self.num_microbatches)
        try:
            fitting.build(model, spec)
        except (RuntimeError, ValueError):
            if not without_call.builds_otherwise(model):
                raise
        adapt(model)
        measuring = fit.callbacks_of(GradientNoiseScale)
        noise = measuring[0].noise_of(model) if measuring else None
        before = model.tfscale_accumulation
        if not self._can_go_on(before, noise):
            before = Accumulation(model, self.num_microbatches, noise)
        self._accumulation = before
        self._function = FitScopedFunction(
            model, fit, self._accumulation.plain, self._accumulation.function
        )

    def _can_go_on(self, before, noise):
        """Whether the steps of an earlier fit are traced for this one too."""
        if before is None or before.noise is not noise:
            return False
        if before.plain is not self.model.train_function:
            return False
        return before.num_microbatches == self.num_microbatches

    def on_train_end(self, logs: Logs = None) -> None:
        """See `keras.callbacks.Callback`."""
        if self._function is not None:
            self._function.end()
