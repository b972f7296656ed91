"""Watches how long training waits for its input, and warns once."""

import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.fit.fit import Logs

_WARM_UP = 3  # steps that trace, and fill buffers
_KEPT = 256  # batches of which the arrival is known: more than are ahead


class InputWait(keras.callbacks.Callback):
    """Measures the wait for input during `fit` and warns when it matters.

    `fit` reads a batch within its compiled step, where nothing can be timed
    from outside. So the dataset notes when it hands out each batch; the time
    from the beginning of a step to the arrival of its batch is waiting.
    Strategies read batches ahead:

        step       | 0      | 1      | 2      |
        arrivals  0  1        2        3            no wait for 1, 2, 3

    The share of waiting is in the logs of each epoch as `input_wait`. With
    several steps per execution, a batch of which all but the first arrive
    during the execution, it is an upper bound.

    Args:
        threshold: Float from 0 to 1: warn if more of the time is waiting.
        num_steps: Integer: how many steps to judge by.

    Example:

    >>> import tensorflow as tf
    >>> wait = InputWait()
    >>> dataset = wait.watch(tf.data.Dataset.range(4).batch(2))
    >>> # model.fit(dataset, callbacks=[wait])
    >>> wait.share
    0.0
    """

    def __init__(self, threshold: float = 0.1, num_steps: int = 20):
        super().__init__()
        if not 0 <= threshold <= 1 or num_steps < 1:
            raise ValueError(
                "`threshold` must be from 0 to 1 and `num_steps` 1 or more. "
                f"Received: threshold={threshold}, num_steps={num_steps}."
            )
        self.threshold = threshold
        self.num_steps = num_steps
        self._warned = False
        self._arrivals = None
        self._iterators = None
        self._seen_iterators = 0
        self._num_before = self._last = 0  # batches: of epochs before, in all
        self._start()

    def watch(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset to give to `fit`: the same, and it reports.

        Args:
            dataset: `tf.data.Dataset`.

        Returns:
            `tf.data.Dataset` with the same elements and cardinality.
        """
        if self._arrivals is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._arrivals, self._iterators = (
                    symbols.ResourceVariable(value, trainable=False)
                    for value in (np.zeros(_KEPT), np.int64(0))
                )

        def stamp(number, batch):
            tf.raw_ops.ResourceScatterUpdate(
                resource=self._arrivals.handle,
                indices=number % _KEPT,
                updates=tf.timestamp(),
            )
            begins = tf.cast(tf.equal(number, 0), tf.int64)
            self._iterators.assign_add(begins, read_value=False)
            return batch

        options = tf.data.Options()
        # A prefetch after the stamp would stamp too early.
        options.experimental_optimization.inject_prefetch = False
        return dataset.enumerate().map(stamp).with_options(options)

    @property
    def share(self) -> float:
        """Float: the share of the time since the epoch began."""
        return self._waited / self._total if self._total else 0.0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks that there is something to watch."""
        if self._arrivals is None:
            raise ValueError(
                "`InputWait` watches the dataset that `watch` returned. "
                "Received: `fit` without it. Use "
                "`fit(wait.watch(dataset), callbacks=[wait])`."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Starts a new measurement."""
        self._start()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Notes when the step began, by the clock of `tf.timestamp`."""
        self._begin = time.time()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Adds up, and warns."""
        seconds = time.time() - self._begin
        arrival = self._arrival_of(batch)
        self._seen += 1
        if self._seen <= _WARM_UP:
            return
        self._total += seconds
        self._waited += min(max(arrival - self._begin, 0.0), seconds)
        judged = self._seen - _WARM_UP
        if judged < self.num_steps or self._warned:
            return
        if self.share > self.threshold:
            self._warned = True
            warnings.warn(
                f"Training waits for its input {self.share:.0%} of the time "
                f"(over {judged} steps). `tfscale.data.explain(dataset, "
                "model)` says which stage is slow and what would help.",
                stacklevel=2,
            )

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds `input_wait` to the logs."""
        self._num_before = self._last
        if logs is not None:
            logs["input_wait"] = self.share

    def _arrival_of(self, batch):
        """The arrival time of a batch of the epoch, by its index."""
        iterators = int(self._iterators)
        if iterators != self._seen_iterators:
            # With `steps_per_epoch` one iterator serves all epochs.
            self._seen_iterators = iterators
            self._num_before = 0
        number = self._num_before + batch
        self._last = number + 1
        return float(self._arrivals.numpy()[number % _KEPT])

    def _start(self):
        self._seen = 0
        self._waited = 0.0
        self._total = 0.0
