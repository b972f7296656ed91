"""Adapts the batch size and the learning rate of a `fit` to a noise scale."""

import math
from typing import Any

import keras
import numpy as np

from tfscale._internals import fitting
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.fit.fit import Fit

# By which the learning rate follows the batch size.
RULES = ("adascale", "sqrt")


class BatchAdapter:
    """Adapts to a noise scale, by arguments of `GradientNoiseScale`."""

    def __init__(
        self, batch_sizes: tuple[int, int] | None, learning_rate: str | None
    ):
        if batch_sizes is not None and not (
            len(batch_sizes) == 2 and 1 <= batch_sizes[0] <= batch_sizes[1]
        ):
            raise ValueError(
                "`batch_sizes` must be the smallest and the largest global "
                f"batch size. Received: batch_sizes={batch_sizes!r}."
            )
        if learning_rate not in (None, *RULES):
            raise ValueError(
                '`learning_rate` must be "adascale", "sqrt" or None. '
                f"Received: learning_rate={learning_rate!r}."
            )
        if learning_rate is not None and batch_sizes is None:
            raise ValueError(
                "`learning_rate` needs `batch_sizes`, because it follows the "
                f"batch size. Received: learning_rate={learning_rate!r} "
                "without `batch_sizes`. Set, for example, batch_sizes=(32, "
                "1024)."
            )
        self._range = batch_sizes
        self._rule = learning_rate
        self._start = 0  # the batch size that the learning rate was for
        self._sizes: list[int] = []
        self._fit: Fit
        self._factor = 1.0  # of the learning rate, since the start
        # The optimizer of the last fit, and its learning rate when that ended;
        # None after an exception.
        self._optimizer: keras.Optimizer | None = None
        self._last_rate: float | None = None

    def begin(self, model: keras.Model, fit: Fit) -> None:
        """Finds the batch sizes of a `fit`: the first, halved and doubled."""
        self._fit = fit
        if self._range is None:
            return
        if self._rule is not None:
            check_learning_rate(model.optimizer)
        plan = self._plan()
        start = self.batch_size()
        smallest, largest = self._range
        if not smallest <= start <= largest:
            raise ValueError(
                "The batch size of the pipeline must be in the range. "
                f"Received: batch_size={start}, batch_sizes={self._range}."
            )
        optimizer, last = model.optimizer, self._last_rate
        if optimizer is not self._optimizer or last not in (
            None,
            _rate_of(optimizer),
        ):
            # It was set for this batch size, and is not what was adapted.
            self._start, self._factor = start, 1.0
        self._optimizer, self._last_rate = optimizer, None
        multiple = math.lcm(
            plan.lines * plan.num_workers * plan.batches_per_step,
            model.distribute_strategy.num_replicas_in_sync,
        )
        largest = min(largest, plan.limit * plan.lines)
        sizes = [start]
        while sizes[-1] * 2 <= largest:
            sizes.append(sizes[-1] * 2)
        while sizes[0] % (2 * multiple) == 0 and sizes[0] // 2 >= smallest:
            sizes.insert(0, sizes[0] // 2)
        self._sizes = sizes

    def adapt(self, model: keras.Model, square: float, variance: float) -> None:
        """Changes batch size and learning rate at the beginning of an epoch.

        `square` and `variance` are |G|^2 and S of `GradientNoise`; NaN,
        when they are not known yet, changes nothing.
        """
        if self._range is None or math.isnan(square):
            return
        size = self._sizes[-1]
        if square:
            # The one whose ratio to the noise scale is nearest to 1.
            target = math.log(max(variance / square, 1.0))
            size = min(self._sizes, key=lambda s: abs(math.log(s) - target))
        self._set_batch_size(size)
        optimizer = model.optimizer
        if self._rule is not None:
            factor = factor_of_learning_rate(
                self._rule, self._start, size, square, variance
            )
            scale_learning_rate(optimizer, factor / self._factor)
            self._factor = factor

    def end(self) -> None:
        """Notes the learning rate with which a `fit` ends."""
        if self._rule is not None:
            self._last_rate = _rate_of(self._optimizer)

    def get_state(self) -> dict[str, Any]:
        """The state in a backup: `batch_size`, or None, `factor`, `start`."""
        batch_size = None if self._range is None else self.batch_size()
        return {
            "batch_size": batch_size,
            "factor": self._factor,
            "start": self._start,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `get_state`."""
        self._factor, self._start = state["factor"], state["start"]
        if self._range is not None:
            self._set_batch_size(state["batch_size"])

    def batch_size(self) -> int:
        """The global batch size, in rows, of the pipeline that `fit` has."""
        plan = self._plan()
        return plan.global_batch * plan.lines

    def _set_batch_size(self, size):
        if size != self.batch_size():
            epochs, callbacks = self._fit.epochs, self._fit.callbacks
            dataset = fitting.source_of(epochs).with_batch_size(size)
            fitting.give_data(epochs, callbacks, dataset)

    def _plan(self):
        epochs = self._fit.epochs
        source = fitting.source_of(epochs)
        if (
            not isinstance(source, ResumableDataset)
            or epochs.steps_per_epoch is not None
        ):
            raise ValueError(
                "Only the batch size of a `tfscale.data.pipeline` can be "
                f"adapted, in whole epochs. Received: {type(source).__name__}, "
                f"steps_per_epoch={epochs.steps_per_epoch}. Pass the pipeline "
                "itself to `fit`, without `steps_per_epoch` and "
                "`class_weight`."
            )
        return source.recipe.plan


def factor_of_learning_rate(
    rule: str, start: int, size: int, square: float, variance: float
) -> float:
    """The ratio of the learning rates for batches of `size` and `start` rows.

    `rule` is "linear", "sqrt" or "adascale"; for the last `square` and
    `variance` are those of `BatchAdapter.adapt`, and 0 or NaN if not known.
    """
    ratio = size / start
    if rule == "linear":
        return ratio
    if rule == "sqrt":
        return math.sqrt(ratio)
    if not square + variance > 0.0:
        return 1.0
    return (variance / start + square) / (variance / size + square)


def scale_learning_rate(optimizer: keras.Optimizer, factor: float) -> None:
    """Multiplies the learning rate of an optimizer without a schedule."""
    optimizer.learning_rate = _rate_of(optimizer) * factor


def _rate_of(optimizer):
    return float(np.asarray(optimizer.learning_rate))


def check_learning_rate(optimizer: keras.Optimizer) -> None:
    """Raises a `ValueError` if the learning rate is no number."""
    if isinstance(optimizer.get_config().get("learning_rate"), dict):
        raise ValueError(
            "An adapted learning rate must be a number. Received: an "
            "optimizer with a schedule. Use "
            "`keras.callbacks.LearningRateScheduler` with a function that "
            "multiplies, or learning_rate=None."
        )
