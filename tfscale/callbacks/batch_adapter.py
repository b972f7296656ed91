"""Has the batch size and the learning rate of a `fit` go by a noise scale."""

import math
from typing import Any

import keras
import numpy as np

from tfscale import _internals
from tfscale.callbacks import adaptive_batch
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.fit.fit import Fit


class BatchAdapter:
    """Changes the batch size of a pipeline between epochs.

    Args:
        batch_sizes: `(smallest, largest)`, integers: the range of global batch
            sizes. None to change nothing.
        learning_rate: "adascale" or "sqrt"; None to leave it as it is.

    Raises:
        ValueError: If an argument makes no sense.
    """

    def __init__(
        self,
        batch_sizes: tuple[int, int] | None,
        learning_rate: str | None,
    ):
        if batch_sizes is not None and not (
            len(batch_sizes) == 2 and 1 <= batch_sizes[0] <= batch_sizes[1]
        ):
            raise ValueError(
                "`batch_sizes` must be the smallest and the largest global "
                f"batch size. Received: batch_sizes={batch_sizes!r}."
            )
        if learning_rate not in (None, *adaptive_batch.LEARNING_RATES):
            raise ValueError(
                '`learning_rate` must be "adascale", "sqrt" or None. '
                f"Received: learning_rate={learning_rate!r}."
            )
        if learning_rate is not None and batch_sizes is None:
            raise ValueError(
                "The learning rate goes with the batch size. Received: "
                f"learning_rate={learning_rate!r} without `batch_sizes`. Set "
                "`batch_sizes`, such as (32, 1024)."
            )
        self._range = batch_sizes
        self._rule = learning_rate
        self._start = 0
        self._sizes: list[int] = []
        self._fit: Fit
        self._factor = 1.0  # of the learning rate, since the start

    def begin(self, model: keras.Model, fit: Fit) -> None:
        """Finds the batch sizes that a `fit` can have.

        Args:
            model: The model that is trained.
            fit: Its `fit`, which runs.

        Raises:
            ValueError: If the batch size, or the learning rate, of this `fit`
                cannot be changed.
        """
        self._fit = fit
        if self._range is None:
            return
        if self._rule is not None:
            _check_learning_rate(model.optimizer)
        plan = _plan_of_pipeline(fit.epochs)
        start = plan.global_batch * plan.lines
        if not self._range[0] <= start <= self._range[1]:
            raise ValueError(
                "The pipeline must begin with a batch size in the range. "
                f"Received: batch_size={start}, batch_sizes={self._range}."
            )
        self._start = start
        self._factor = 1.0
        multiple = math.lcm(
            plan.lines * plan.num_workers * plan.batches_per_step,
            model.distribute_strategy.num_replicas_in_sync,
        )
        largest = min(self._range[1], plan.limit * plan.lines)
        self._sizes = adaptive_batch.sizes_around(
            start, self._range[0], largest, multiple
        )

    def adapt(
        self,
        model: keras.Model,
        noise_scale: float,
        square: float,
        variance: float,
    ) -> None:
        """Changes batch size and learning rate, at an epoch's beginning.

        Args:
            model: The model that is trained.
            noise_scale: In rows; NaN, when none is known, changes nothing.
            square: |G|^2, see `GradientNoise`; 0 or more.
            variance: S, see `GradientNoise`; 0 or more.
        """
        if self._range is None or math.isnan(noise_scale):
            return
        size = adaptive_batch.nearest(self._sizes, noise_scale)
        self._set_batch_size(size)
        if self._rule is None:
            return
        factor = adaptive_batch.rate_factor(
            self._rule, self._start, size, square, variance
        )
        optimizer = model.optimizer
        rate = float(np.asarray(optimizer.learning_rate))
        optimizer.learning_rate = rate * factor / self._factor
        self._factor = factor

    def get_state(self, model: keras.Model) -> dict[str, Any]:
        """What a backup keeps: `batch_size`, or None, and `factor`."""
        adapts = self._range is not None
        return {
            "batch_size": self.batch_size() if adapts else None,
            "factor": self._factor,
        }

    def set_state(self, model: keras.Model, state: dict[str, Any]) -> None:
        """Goes on from what `get_state` returned."""
        self._factor = state["factor"]
        if self._range is not None:
            self._set_batch_size(state["batch_size"])

    def batch_size(self) -> int:
        """The global batch size, in rows, of the pipeline that `fit` has."""
        plan = _plan_of_pipeline(self._fit.epochs)
        return plan.global_batch * plan.lines

    def _set_batch_size(self, size):
        if size != self.batch_size():
            epochs, callbacks = self._fit.epochs, self._fit.callbacks
            dataset = _internals.source_of(epochs).with_batch_size(size)
            _internals.give_data(epochs, callbacks, dataset)


def _check_learning_rate(optimizer):
    if isinstance(optimizer.get_config().get("learning_rate"), dict):
        raise ValueError(
            "A learning rate that is adapted must be a number. Received: an "
            "optimizer with a schedule. Use the callback "
            "`keras.callbacks.LearningRateScheduler`, with a function that "
            "multiplies, or learning_rate=None."
        )


def _plan_of_pipeline(epochs):
    source = _internals.source_of(epochs)
    if (
        not isinstance(source, ResumableDataset)
        or epochs.steps_per_epoch is not None
    ):
        raise ValueError(
            "The batch size of what `tfscale.data.pipeline` returned can be "
            "adapted, in epochs of all of it. Received: "
            f"{type(source).__name__}, "
            f"steps_per_epoch={epochs.steps_per_epoch}. Give `fit` the "
            "pipeline itself, and no `steps_per_epoch` and no `class_weight`."
        )
    return source.recipe.plan
