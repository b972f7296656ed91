"""Figures while a model trains: throughput, FLOPs, waits and memory."""

import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.adapters.epochs import follow
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.throughput.hindrances import hindrance
from tfscale.throughput.noted_data import NotedData
from tfscale.throughput.steps import Meter
from tfscale.throughput.steps import Steps
from tfscale.throughput.utilization import Utilization
from tfscale.throughput.utilization import check_peak
from tfscale.throughput.utilization import memory_bytes

_SECONDS = 0.5  # between two readings of what arrived
# While an epoch runs, the first of each that is known: the progress bar needs a
# line of the terminal.
_SHOWN = (
    ("tokens_per_second", "examples_per_second"),
    ("input_wait",),
    ("mfu", "tflops"),
)


class Throughput(keras.callbacks.Callback):
    """Adds figures of the training to the logs of batches and epochs.

    They are in the progress bar, in `History`, and in what `CSVLogger` and
    `TensorBoard` write, while an epoch runs only speed, wait and utilization:

    * `examples_per_second`: of all devices together.
    * `tokens_per_second`: the same in tokens, where inputs are integers of
      shape `[batch, length]`.
    * `input_wait`: the share of the time, 0 to 1, that steps wait for a batch.
    * `tflops`: 10^12 FLOP/s of each device, by the FLOPs of the model's
      forward and backward.
    * `mfu`, model FLOPs utilization: the share of a device's peak, 0 to 1.
    * `memory_gb`: the most so far, in 10^9 bytes, of the fullest accelerator;
      on CPUs that of the process.

    The figures of an epoch are those of its steps, without the first step of
    each shape of batches, which is traced, and without validation, saving and
    other callbacks. An epoch without any other step has none. On several
    workers they are those of all, in the logs of worker 0; wait and memory are
    the largest.

    At the end of an epoch a line says what holds the steps back where it is
    clear: waiting for input, the bubble of a pipeline or, on devices that the
    planner knows, the gradients of replicas. `fit` with `verbose=0` prints
    none.

    FLOPs are counted once, after the first step, in a trace of the model for
    one example; forwards that are recomputed do not count. They are left out,
    and a line says why, if the model has a `train_step` of its own or inputs
    of open sizes. `mfu` is left out if the peak is not known.

    The callback moves to the front of the list of callbacks, so that the others
    find the figures.

    Args:
        peak_tflops: Float, 10^12 FLOP/s: the peak of a device for `mfu`. By
            default that of the planner's table, see `tfscale.planner.DEVICES`.

    Raises:
        ValueError: If `peak_tflops` is not above 0. From `fit`, if a batch has
            no rows.

    Source of `mfu`: Chowdhery et al., PaLM (2022), appendix B.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(
    ...     np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0,
    ...     callbacks=[Throughput(peak_tflops=0.1)],
    ... )
    >>> history.history["examples_per_second"][0] > 0
    True
    """

    # A step's results need not be there before the next one begins.
    async_safe = True

    def __init__(self, peak_tflops: float | None = None):
        super().__init__()
        check_peak(peak_tflops)
        self.peak_tflops = peak_tflops
        self._told: set[str] = set()
        self._lines: list[str] = []
        self._utilization: Any = None
        self._counted_for: Any = None
        self._fit: Any = None
        self._data: Any = None
        self._steps: Any = None
        self._workers: Any = None
        self._devices: list[str] = []
        self._forget()

    def _forget(self):
        self._figures: dict[str, float] = {}
        self._next = 0.0

    # --- a fit ------------------------------------------------------------

    def on_train_begin(self, logs: Logs = None) -> None:
        """Has the data note its batches."""
        model: Any = self.model
        strategy = model.distribute_strategy
        self._fit = fit = Fit(model)
        callbacks = fit.callbacks.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        if self._utilization is None:
            self._utilization = Utilization(self.peak_tflops)
        self._workers = getattr(strategy.extended, "workers", None)
        self._devices = _devices_of(strategy)
        self._counted_for = None
        self._data = NotedData(fit, strategy)
        self._steps = Steps(self._data)
        follow(fit.epochs, on_iterator=self._begin_iterator)

    def _begin_iterator(self):
        # Batches of the next iterator are noted where those of this one were.
        self._steps.add_up()
        self._data.begin_iterator()

    def on_train_end(self, logs: Logs = None) -> None:
        """Releases the data."""
        self._print_lines()
        self._data.release()
        self._fit = self._data = self._steps = self._counted_for = None

    @property
    def _is_first(self):
        """Whether this process is worker 0, or the only one."""
        return self._workers is None or self._workers.index == 0

    # --- an epoch ---------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins with new sums."""
        self._print_lines()
        self._steps.begin_epoch()
        self._forget()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds the figures of the epoch to the logs."""
        self._steps.add_up()
        meter, memory = self._steps.meter, memory_bytes(self._devices)
        if self._workers is not None:
            memory = self._add_workers(meter, memory)
            if not self._is_first:
                return
        figures = self._figures_of(meter, memory)
        if not figures:
            return
        if logs is not None:
            logs.update(figures)
        found = hindrance(
            self.model,
            figures.get("input_wait"),
            meter.seconds / meter.num_batches,
            self._utilization.device,
        )
        if found is not None:
            self._say(found.sentence, found.cause)

    def _add_workers(self, meter, memory):
        """Sets the longest wait; returns the largest memory.

        Rows are those of all workers already.
        """
        mine = tf.constant([[meter.waited, memory or 0.0]], tf.float64)
        waited, memory = np.max(self._workers.all_gather(mine), axis=0)
        meter.waited = min(float(waited), meter.seconds)
        return float(memory) or None

    # --- a step -----------------------------------------------------------

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Notes that a step begins; counts FLOPs before the second one."""
        model: Any = self.model
        epochs, function = self._fit.epochs, model.train_function
        if self._counted_for is not function and self._steps.has_begun:
            self._counted_for = function
            self._say(self._utilization.count(model, self._data.element_spec))
        self._steps.begin(
            batch, epochs.num_drawn, epochs.steps_per_execution, function
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Adds the figures of the epoch so far to the logs.

        Keras calls it when the results of the step are there, perhaps in
        another thread.
        """
        count = self._fit.epochs.steps_per_execution
        now = self._steps.end(batch + 1 - count)
        if now > self._next:
            self._next = now + _SECONDS
            self._steps.add_up(self._show)
        if logs is not None:
            logs.update(self._figures)

    def _show(self, meter):
        if self._is_first:
            figures = self._figures_of(meter)
            names = (
                next((name for name in names if name in figures), None)
                for names in _SHOWN
            )
            self._figures = {name: figures[name] for name in names if name}

    # --- figures and lines ------------------------------------------------

    def _figures_of(self, meter: Meter, memory: float | None = None):
        if not meter.seconds:
            return {}
        examples = meter.rows / meter.seconds
        figures = {"examples_per_second": examples}
        if meter.tokens:
            figures["tokens_per_second"] = meter.tokens / meter.seconds
        if self._data.arrivals is not None:
            figures["input_wait"] = meter.waited / meter.seconds
        figures |= self._utilization.figures(self.model, examples)
        if memory is not None:
            figures["memory_gb"] = memory / 1e9
        return figures

    def _say(self, line, subject=None):
        """Has a line printed when the progress bar has ended its own.

        It is once for each subject: figures differ from epoch to epoch.
        """
        subject = subject or line
        if subject is not None and subject not in self._told:
            self._told.add(subject)
            self._lines.append(line)

    def _print_lines(self):
        lines, self._lines = self._lines, []
        if self._is_first and self.params and self.params.get("verbose"):
            for line in lines:
                _print(line)


def _devices_of(strategy):
    """Names of the devices of this process that may be trained on."""
    grid = getattr(strategy, "device_grid", None)
    if grid is None:
        return [device.name for device in tf.config.list_logical_devices()]
    return [device for stages in grid for ranks in stages for device in ranks]


def _print(line):
    """Prints as Keras' progress bar does."""
    if keras.config.is_interactive_logging_enabled():
        print(line)
    else:
        logging.info(line)
