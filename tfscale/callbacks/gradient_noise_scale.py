"""Measures how noisy gradients are, and adapts the batch size to that."""

import math
from typing import Any

import keras

from tfscale._internals import fitting
from tfscale.adapters.optimizer import optimizers_of
from tfscale.callbacks.batch_adapter import BatchAdapter
from tfscale.fit.fit import Fit
from tfscale.fit.fit import FitScopedFunction
from tfscale.fit.fit import Logs
from tfscale.mesh.gradient_noise import GradientNoise


class GradientNoiseScale(keras.callbacks.Callback):
    """Measures the gradient noise scale in `fit`, and adapts the batch to it.

    The noise scale is the batch size, in rows, at which the noise of the
    gradient is as large as the gradient: with much smaller batches twice the
    batch makes nearly twice the progress of a step, with much larger ones
    hardly any more. It is measured from existing gradients: of the replicas of
    a `tfscale.MeshStrategy` or, on one replica, of the microbatches of
    `GradientAccumulation`. It is in the logs of each epoch as
    `gradient_noise_scale`.

    If asked to, it doubles or halves the batch size of a
    `tfscale.data.pipeline` at the beginning of an epoch, towards the noise
    scale, and adapts the learning rate: `"adascale"` multiplies it by the gain,
    from 1 to the ratio of the batch sizes, that the noise measured promises;
    `"sqrt"` by the square root of the ratio, as suits Adam.

    Rows count equally: with sample weights or masks it is an estimate of an
    estimate.

    Args:
        smoothing: Float, 0 to 1: by how much the weight of a step shrinks with
            each step that follows; 0.99 averages over some 200 steps.
        batch_sizes: `(smallest, largest)`, integers: the range of global batch
            sizes to adapt in. None to leave it as it is.
        learning_rate: `"adascale"` or `"sqrt"`; None to leave it as it is.

    Raises:
        ValueError: If an argument makes no sense. From `fit`, if there is one
            replica and no accumulation, if there are several optimizers, or
            if batch size or learning rate are to be adapted and cannot be.
        TypeError: From `fit`, under another strategy.

    Sources: McCandlish, Kaplan, Amodei et al.: An Empirical Model of
    Large-Batch Training (2018), appendix A.1 (the estimate). Johnson, Agrawal,
    Gu, Guestrin: AdaScale SGD (2020), section 3 (the gain). Qiao et al.:
    Pollux (2021), section 3 (batch sizes that follow it). Krizhevsky: One
    weird trick for parallelizing convolutional neural networks (2014), section
    5 (the square root).

    Example:

    >>> import numpy as np
    >>> from tfscale.callbacks import GradientAccumulation
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> noise = GradientNoiseScale()
    >>> history = model.fit(
    ...     np.random.randn(64, 4), np.random.randn(64, 1), batch_size=16,
    ...     callbacks=[noise, GradientAccumulation(2)], verbose=0,
    ... )
    >>> "gradient_noise_scale" in history.history
    True
    """

    def __init__(
        self,
        smoothing: float = 0.99,
        *,
        batch_sizes: tuple[int, int] | None = None,
        learning_rate: str | None = None,
    ):
        super().__init__()
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(
                "`smoothing` must be at least 0 and less than 1. Received: "
                f"smoothing={smoothing!r}."
            )
        self.smoothing = smoothing
        self.batch_sizes = batch_sizes
        self.learning_rate = learning_rate
        self._adapter = BatchAdapter(batch_sizes, learning_rate)
        self._noise: GradientNoise | None = None
        self._plain: Any = None
        self._measuring: Any = None
        self._function: Any = None

    @property
    def noise_scale(self) -> float:
        """Float, in rows; NaN before a step, infinite for noise only."""
        square, variance = self.measured()
        if square > 0.0:
            return variance / square
        return math.nan if math.isnan(square) else math.inf

    def measured(self) -> tuple[float, float]:
        """|G|^2 and S, at least 0; NaN before the first step."""
        square = variance = weight = 0.0
        if self._noise is not None:
            square, variance, weight = map(float, self._noise.means)
        if not weight:
            return math.nan, math.nan
        return max(square / weight, 0.0), max(variance / weight, 0.0)

    def noise_of(self, model: keras.Model) -> GradientNoise:
        """The `GradientNoise` of a built and compiled model."""
        if self._noise is None or not self._noise.is_of(model):
            self._noise = GradientNoise(model, self.smoothing)
        return self._noise

    def on_train_begin(self, logs: Logs = None) -> None:
        """Measures the steps of this `fit`."""
        model = self.model
        fit = Fit(model)
        accumulates = any(
            getattr(callback, "num_microbatches", 1) != 1
            for callback in fit.callbacks.callbacks
        )
        self._check(model, accumulates)
        self._adapter.begin(model, fit)
        fitting.build(model, fitting.element_spec_of(fit.epochs))
        before, noise = self._noise, self.noise_of(model)
        noise.begin(fit)
        strategy = model.distribute_strategy
        if strategy.num_replicas_in_sync > 1:
            strategy.extended.measure_gradients(noise)
        if accumulates:
            return  # `GradientAccumulation` makes a function that measures
        if noise is not before or self._plain is not model.train_function:
            self._plain = model.train_function
            model.make_train_function(force=True)
            self._measuring = model.train_function
        self._function = FitScopedFunction(
            model, fit, self._plain, self._measuring
        )

    def _check(self, model, accumulates):
        strategy = model.distribute_strategy
        if model.optimizer is None or len(optimizers_of(model)) > 1:
            raise ValueError(
                "`GradientNoiseScale` needs a model with one optimizer. "
                f"Received: a model with {len(optimizers_of(model))}. Remove "
                "the callback."
            )
        if strategy.num_replicas_in_sync == 1 and not accumulates:
            raise ValueError(
                "The noise scale is computed from the differences between "
                "replicas or microbatches. Received: one replica, and no "
                "accumulation. Add "
                "`tfscale.callbacks.GradientAccumulation(2)`, or train on a "
                "`tfscale.MeshStrategy` with data=2 or more."
            )
        extended = strategy.extended
        gathers = getattr(extended, "gathers_weights", False)
        if gathers or (
            accumulates and getattr(extended, "accumulates_shards", False)
        ):
            raise ValueError(
                "The noise scale is computed from whole gradients of each "
                "replica. Received: "
                f"zero_stage={extended.optimizer_states.stage}, which shards "
                "them. Use zero_stage=1 while you measure it."
            )
        if strategy.num_replicas_in_sync > 1 and not hasattr(strategy, "mesh"):
            raise TypeError(
                "`GradientNoiseScale` needs the replicas of a "
                f"`tfscale.MeshStrategy`. Received: {type(strategy).__name__}. "
                "Use `tfscale.MeshStrategy`."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Changes the batch size and the learning rate, if asked to."""
        self._adapter.adapt(self.model, *self.measured())

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds `gradient_noise_scale` to the logs, and `batch_size`."""
        if logs is not None:
            logs["gradient_noise_scale"] = self.noise_scale
            if self.batch_sizes is not None:
                logs["batch_size"] = self._adapter.batch_size()

    def on_train_end(self, logs: Logs = None) -> None:
        """Restores the model, but for its learning rate."""
        self._adapter.end()
        extended = self.model.distribute_strategy.extended
        if getattr(extended, "gradient_noise", None) is self._noise:
            extended.measure_gradients(None)
        if self._function is not None:
            self._function.end()

    def get_state(self) -> dict[str, Any]:
        """The state in a `BackupAndRestore`: numbers and an array."""
        means = self.noise_of(self.model).means
        return {"means": means, **self._adapter.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `get_state`."""
        self.noise_of(self.model).set(state["means"])
        self._adapter.set_state(state)
