"""Watches how long training waits for its input, and warns once."""

import time
import warnings

import keras
import tensorflow as tf

from tfscale.distribute import _tf_internals

_WARM_UP = 3  # steps that trace, and fill buffers


class InputWait(keras.callbacks.Callback):
    """Measures the wait for input during `fit` and warns when it matters.

    `fit` takes a batch within its compiled step, where nothing can be timed
    from outside. So the dataset tells when it has handed a batch out, and what
    lies between the beginning of the step and that was waiting. The share of
    the time spent so is in the logs of each epoch as `input_wait`.

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

    def __init__(self, threshold=0.1, num_steps=20):
        super().__init__()
        if not 0 <= threshold <= 1 or num_steps < 1:
            raise ValueError(
                "`threshold` must be from 0 to 1 and `num_steps` 1 or more. "
                f"Received: threshold={threshold}, num_steps={num_steps}."
            )
        self.threshold = threshold
        self.num_steps = num_steps
        self._warned = False
        self._arrival = None
        self._start()

    def watch(self, dataset):
        """The dataset to give to `fit`: the same, and it reports.

        Args:
            dataset: `tf.data.Dataset`.

        Returns:
            `tf.data.Dataset` with the same elements and cardinality.
        """
        if self._arrival is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._arrival = _tf_internals.ResourceVariable(
                    0.0, dtype=tf.float64, trainable=False
                )

        def stamp(*batch):
            self._arrival.assign(tf.timestamp())
            return batch if len(batch) > 1 else batch[0]

        options = tf.data.Options()
        # A prefetch after the stamp would stamp before anybody asks.
        options.experimental_optimization.inject_prefetch = False
        return dataset.map(stamp).with_options(options)

    @property
    def share(self):
        """Float: the share of the time since the epoch began."""
        return self._waited / self._total if self._total else 0.0

    def on_train_begin(self, logs=None):
        """Checks that there is something to watch."""
        if self._arrival is None:
            raise ValueError(
                "`InputWait` watches the dataset that `watch` returned. "
                "Received: `fit` without it. Use "
                "`fit(wait.watch(dataset), callbacks=[wait])`."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Starts anew."""
        self._start()

    def on_train_batch_begin(self, batch, logs=None):
        """Notes when the step began, by the clock of `tf.timestamp`."""
        self._begin = time.time()

    def on_train_batch_end(self, batch, logs=None):
        """Adds up, and warns."""
        self._seen += 1
        if self._seen <= _WARM_UP:
            return
        self._total += time.time() - self._begin
        self._waited += max(float(self._arrival) - self._begin, 0.0)
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

    def on_epoch_end(self, epoch, logs=None):
        """Adds `input_wait` to the logs."""
        if logs is not None:
            logs["input_wait"] = self.share

    def _start(self):
        self._seen = 0
        self._waited = 0.0
        self._total = 0.0
