"""Trains a model with batches that are cut into microbatches."""

import warnings

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.callbacks.gradient_noise_scale import GradientNoiseScale
from tfscale.fit.fit import Fit
from tfscale.fit.fit import FitScopedFunction
from tfscale.fit.fit import Logs
from tfscale.mesh.models import without_call
from tfscale.step.runners import checks
from tfscale.step.runners.accumulation_model import Accumulation
from tfscale.step.runners.accumulation_model import adapt
from tfscale.step.runners.loop import GivenNumber
from tfscale.step.runners.loop import GivenRows
from tfscale.step.runners.memory import rows_that_fit


class GradientAccumulation(keras.callbacks.Callback):
    """Cuts each batch into microbatches, with one update for all of them.

    For any Keras model, also one with a custom `call`, `compute_loss` or
    `train_step`: a batch needs the memory of a microbatch, and the update is
    that of the whole batch, for all masks, sample weights, batch sizes and
    reductions. So clipping, schedules, averages and `optimizer.iterations`
    count batches, and replicas sum their gradients once per batch.

    As in every accumulation, `BatchNormalization` normalises each microbatch
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
            has as many as rows. Or `"auto"`: the smallest number that is
            estimated to fit in memory, from the sizes of the tensors of a
            step, which is traced before training. In a graph, without XLA.
            Workers agree on the largest number that one of them needs.
        memory_limit: With `"auto"`, bytes that each device may take (all CPU
            devices together). By default the memory of a GPU, and the memory of
            the host that the process may use. A tenth of the free memory is
            left.

    Raises:
        TypeError: If `num_microbatches` is no int. When `fit` begins, if the
            strategy is another one.
        ValueError: If `num_microbatches` is less than 1, or `memory_limit` is
            not above 0 or not for `"auto"`. When `fit` begins, if
            the model is a `PipelineModel`, if the optimizer accumulates too
            or clips under `MirroredStrategy`, or if all batches have fewer
            rows than microbatches; with `"auto"` if the model is compiled with
            `run_eagerly` or XLA, or a size of its step is not known (of what a
            recurrent layer keeps, say). In the first step, before any variable
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

    def __init__(
        self, num_microbatches: int | str, *, memory_limit: float | None = None
    ):
        super().__init__()
        _check(num_microbatches, memory_limit)
        self.num_microbatches = num_microbatches
        self.memory_limit = memory_limit
        self._accumulation: Accumulation | None = None
        self._function: FitScopedFunction | None = None

    @property
    def found_num_microbatches(self) -> int | None:
        """With `"auto"` the number of the largest batch; `None` before it."""
        if self._accumulation is None:
            return None
        return getattr(self._accumulation.microbatches, "found", None)

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
        if isinstance(self.num_microbatches, str):
            checks.check_can_estimate(model)
        else:
            checks.check_rows(spec, self.num_microbatches)
        try:
            fitting.build(model, spec)
        except (RuntimeError, ValueError) as error:
            if not without_call.builds_otherwise(model, error):
                raise
        adapt(model)
        measuring = fit.callbacks_of(GradientNoiseScale)
        noise = measuring[0].noise_of(model) if measuring else None
        before = model.tfscale_accumulation
        if not self._can_go_on(before, noise):
            microbatches = self._microbatches_for(model, spec, workers)
            before = Accumulation(model, microbatches, noise)
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
        if self.num_microbatches == "auto":  # found for one callback's data
            return before is self._accumulation
        return before.microbatches.number == self.num_microbatches

    def _microbatches_for(self, model, spec, workers):
        if not isinstance(self.num_microbatches, str):
            return GivenNumber(self.num_microbatches)
        rows = rows_that_fit(model, spec, self.memory_limit)
        if rows < 1:
            warnings.warn(
                "Memory should have room for microbatches of one row. "
                "Received: num_microbatches='auto', and less memory than a "
                "step of one row is estimated to take. Go on with a larger "
                "`memory_limit`, or cut the model (`PipelineModel`).",
                stacklevel=2,
            )
            rows = 1
        if workers is not None:
            # A step may exchange values in each microbatch.
            rows = int(tf.reduce_min(workers.all_gather(tf.constant([[rows]]))))
        return GivenRows(rows)

    def on_train_end(self, logs: Logs = None) -> None:
        """See `keras.callbacks.Callback`."""
        if self._function is not None:
            self._function.end()


def _check(num_microbatches, memory_limit):
    is_auto = num_microbatches == "auto"
    if type(num_microbatches) is not int and not is_auto:
        raise TypeError(
            "`num_microbatches` must be an int or 'auto'. Received: "
            f"num_microbatches={num_microbatches!r}."
        )
    if not is_auto and num_microbatches < 1:
        raise ValueError(
            "`num_microbatches` must be 1 or more. Received: "
            f"num_microbatches={num_microbatches}."
        )
    if memory_limit is not None and not (is_auto and memory_limit > 0):
        raise ValueError(
            "`memory_limit` must be bytes above 0, and is for "
            "num_microbatches='auto'. Received: memory_limit="
            f"{memory_limit}, num_microbatches={num_microbatches!r}. Leave it "
            "out, or take 'auto'."
        )
