"""Profiles some steps of a `fit`, and says where their time goes."""

import glob
import json
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.integers import check_integer
from tfscale.profiling import planes
from tfscale.profiling.breakdown import Recording
from tfscale.profiling.breakdown import Shares
from tfscale.profiling.breakdown import shares
from tfscale.profiling.layer_times import layer_times
from tfscale.profiling.report import as_table
from tfscale.profiling.report import timelines
from tfscale.schedules.timeline import as_chrome_trace
from tfscale.throughput.utilization import Utilization
from tfscale.throughput.utilization import check_peak

# After the last step, until threads have noted that they are done with it.
_SECONDS = 0.05
_RULE = "two integers from 0, and the second one larger"


class Profile(keras.callbacks.Callback):
    """Runs TensorFlow's profiler around some steps, and reads what it wrote.

    After these steps a table, which `fit` with `verbose=0` does not print, says
    for each device the share of the time that it computes, communicates over
    each axis of the mesh, does both at once and is idle; and of the idle time,
    how long it waits for input and in the bubble of a pipeline. The overlap is
    the time of both over that of communication. A second table has the ten
    layers that take longest, forward and backward.

    The means over devices are in the logs of the epoch, from 0 to 1:
    `profile_compute`, `profile_communication`, `profile_idle`,
    `profile_input_wait`, `profile_bubble` and, where the peak of a device is
    known, `profile_mfu`.

    `log_dir` then has the files of the profiler, which xprof and TensorBoard
    open, and `timeline.json` for Perfetto (https://ui.perfetto.dev). Several
    workers write to `log_dir/worker_0` and so on; the first one prints.

    Operations count for the layer in whose scope they are: not those of a
    `tf.custom_gradient`, which has none, and of CPUs not those that XLA
    compiles.

    With `steps_per_execution` whole executions are profiled, all that have one
    of the steps. While the callback is there, each step waits for its results.

    On CPUs a device communicates while it sends to another device of its
    process. It is idle while it waits for one, or for other workers.
    Planes of GPUs are read by the names that TensorFlow documents for kernels,
    copies and NCCL, and were not tried on several GPUs: which axis NCCL sends
    over is only known if the mesh has a single axis, and is "several" else.

    Args:
        steps: `(start, stop)`, integers: profiles the steps from `start` to
            before `stop`, counted from 0 over the epochs of a `fit`. The first
            steps are slower, because they are traced.
        log_dir: Where to write, or None for a temporary folder.
        peak_tflops: Float, 10^12 FLOP/s: the peak of a device for the MFU. By
            default that of the planner's table, see `tfscale.planner.DEVICES`.

    Attributes:
        shares: Device to its `Shares`, empty before the steps.
        layers: Layer to its seconds in a step, forward and backward, dearest
            first. Times of all devices add up.
        mfu: Model FLOPs utilization from 0 to 1, or None if it is not known.

    Raises:
        TypeError: If `steps` are no integers.
        ValueError: If `steps` are negative or do not increase, or
            `peak_tflops` is not above 0. When `fit` begins, if another profiler
            runs, if `fit` has another callback that profiles, or under
            parameter servers, whose devices are in other processes.

    Example:

    >>> import numpy as np
    >>> dense = keras.layers.Dense(1, name="dense")
    >>> model = keras.Sequential([keras.Input((4,)), dense])
    >>> model.compile("sgd", "mse")
    >>> profile = Profile(steps=(2, 4))
    >>> history = model.fit(
    ...     np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0,
    ...     callbacks=[profile],
    ... )
    >>> list(profile.layers)
    ['dense']
    """

    def __init__(
        self,
        steps: Sequence[int] = (10, 12),
        log_dir: str | None = None,
        *,
        peak_tflops: float | None = None,
    ):
        super().__init__()
        check_peak(peak_tflops)
        self.steps = _checked(steps)
        self.log_dir = log_dir
        self.peak_tflops = peak_tflops
        self.shares: dict[str, Shares] = {}
        self.layers: dict[str, tuple[float, float]] = {}
        self.mfu: float | None = None
        self._recording = Recording([], [], [])
        self._is_running = False
        self._trace: Any = None
        self._fit: Any = None
        self._forget()

    def _forget(self):
        self._before = self._done = self._num_profiled = 0
        self._figures: dict[str, float] = {}

    # --- a fit ------------------------------------------------------------

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks that no other profiler runs."""
        model: Any = self.model
        self._fit = fit = Fit(model)
        if len(fit.callbacks_of(Profile)) > 1:
            raise ValueError(
                "TensorFlow has one profiler. Received: several `Profile` "
                "callbacks. Pass one with all steps."
            )
        tensorboards = fit.callbacks_of(keras.callbacks.TensorBoard)
        if any(map(fitting.is_to_profile, tensorboards)):
            raise ValueError(
                "TensorFlow has one profiler. Received: `Profile` and "
                "`TensorBoard` with `profile_batch`. Leave `profile_batch` "
                "out: TensorBoard opens what `Profile` writes to its `log_dir`."
            )
        strategy = model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                "`Profile` reads the devices of its own process. Received: "
                f"{strategy}, whose workers are other processes. Use "
                "`tf.profiler.experimental.client`."
            )
        if self._is_running:  # An exception has ended the last `fit`.
            self._stop(save=False)
        self._forget()
        workers = getattr(strategy.extended, "workers", None)
        self._task = 0 if workers is None else workers.index
        folder = self.log_dir or tempfile.mkdtemp(prefix="profile_")
        if workers is not None:
            folder = os.path.join(folder, f"worker_{self._task}")
        self._folder = folder
        self._start()
        self._stop(save=False)

    def _start(self):
        try:
            tf.profiler.experimental.start(self._folder)
        except tf.errors.AlreadyExistsError as error:
            raise ValueError(
                "TensorFlow has one profiler, which runs already. Received: "
                f"`Profile(steps={self.steps})`. Stop the other one with "
                "`tf.profiler.experimental.stop` before `fit`."
            ) from error
        self._is_running = True

    def _stop(self, save=True):
        self._is_running = False
        tf.profiler.experimental.stop(save=save)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Counts the steps of epochs before."""
        self._before = self._done

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begins to profile."""
        count = self._fit.epochs.steps_per_execution
        begin = self._before + batch
        if self._is_running or (
            begin < self.steps[1] and begin + count > self.steps[0]
        ):
            if not self._is_running:
                self._start()
            self._trace = tf.profiler.experimental.Trace(
                planes.STEP, step_num=begin, _r=1
            )
            self._trace.__enter__()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Ends to profile, and prints the table."""
        begin, self._done = self._done, self._before + batch + 1
        if not self._is_running:
            return
        self._trace.__exit__(None, None, None)
        self._trace = None
        self._num_profiled += self._done - begin
        if self._done >= self.steps[1]:
            self._read()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Adds the figures to the logs of the epoch that has the steps."""
        if logs is not None:
            logs.update(self._figures)
        self._figures = {}

    def on_train_end(self, logs: Logs = None) -> None:
        """Says if the steps to profile did not come."""
        if self._is_running:
            self._read()
        if self._done < self.steps[1] and self._task == 0:
            print(
                f"`Profile`: `fit` ended after {self._done} steps. Received: "
                f"steps={self.steps}, so that {self._num_profiled} were "
                "profiled. Choose earlier ones."
            )
        self._fit = None

    # --- what was profiled --------------------------------------------------

    def table(self) -> str:
        """The shares of devices and the dearest layers, as text."""
        if not self.shares:
            return f"No step was profiled: steps={self.steps}."
        begins, ends = zip(*self._recording.steps)
        seconds = sum(ends) - sum(begins)
        seconds *= 1e-12 / self._num_profiled
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        head = f"{self._num_profiled} steps of {1e3 * seconds:.3f} ms{mfu}"
        return as_table(self.shares, self.layers, head)

    def timelines(self) -> dict[str, list[Any]]:
        """Device to spans in seconds, for `tfscale.schedules.as_chrome_trace`.

        Thread 0 of a device computes, thread 1 communicates.
        """
        return timelines(self._recording)

    def _read(self):
        model: Any = self.model
        time.sleep(_SECONDS)
        self._stop()
        folder = glob.escape(os.fspath(self._folder))
        pattern = os.path.join(folder, "plugins/profile/*/*.xplane.pb")
        path = max(glob.glob(pattern), key=os.path.getmtime)
        space = symbols.xplane_pb2.XSpace()
        with open(path, "rb") as file:
            space.ParseFromString(file.read())
        mesh = _Mesh(model.distribute_strategy)
        self._recording = recording = planes.read_space(
            space, mesh.axis_of, mesh.device, self._task
        )
        self.shares = shares(recording, mesh.pipelines)
        layers = attributes.flatten_layers(model)
        names = {layer.name for layer in layers if layer is not model}
        self.layers = {
            name: tuple(1e-12 * time / self._num_profiled for time in pair)
            for name, pair in layer_times(recording.events, names).items()
        }
        if self.shares:
            self._note_figures(model)
            with open(os.path.join(self._folder, "timeline.json"), "w") as file:
                json.dump(as_chrome_trace(self.timelines()), file)
        if self._task == 0 and self.params and self.params.get("verbose"):
            print(self.table())

    def _note_figures(self, model):
        found = list(self.shares.values())

        def mean(values):
            return float(np.mean(list(values)))

        self._figures = {
            "profile_compute": mean(each.compute for each in found),
            "profile_communication": mean(e.communicating for e in found),
            "profile_idle": mean(each.idle for each in found),
            "profile_input_wait": mean(each.input_wait for each in found),
            "profile_bubble": mean(each.bubble for each in found),
        }
        self.mfu = self._mfu(model)
        if self.mfu is not None:
            self._figures["profile_mfu"] = self.mfu

    def _mfu(self, model):
        """By the bytes of the batches that the iterator gave."""
        spec = fitting.element_spec_of(self._fit.epochs)
        utilization = Utilization(self.peak_tflops)
        is_unknown = self.peak_tflops is None and utilization.device is None
        if is_unknown or utilization.count(model, spec):
            return None
        of_row = sum(map(_bytes_of_row, tf.nest.flatten(spec)))
        seconds = sum(e - b for b, e in self._recording.steps) * 1e-12
        rows = self._recording.num_bytes / of_row
        return utilization.figures(model, rows / seconds).get("mfu")


class _Mesh:
    """Which axis two devices differ on, and which make a pipeline."""

    def __init__(self, strategy):
        self.pipelines: list[list[str]] = []
        self._coordinates: dict[str, tuple[int, ...]] = {}
        self._single = "data"
        self.device = _device_of(strategy)
        grid = getattr(strategy, "device_grid", ())
        for replica, stages in enumerate(grid):
            for stage, ranks in enumerate(stages):
                for rank, device in enumerate(ranks):
                    name = planes.short_name(device)
                    self._coordinates[name] = replica, stage, rank
            if len(stages) > 1:
                self.pipelines.append(
                    [planes.short_name(d) for ranks in stages for d in ranks]
                )
        if grid:
            mesh = strategy.mesh
            sizes = zip(mesh.axis_names, mesh.shape)
            axes = [name for name, size in sizes if size > 1]
            self._single = axes[0] if len(axes) == 1 else "several"

    def axis_of(self, source: str | None, target: str | None) -> str:
        """The axis that two devices send over."""
        a = self._coordinates.get(source or "")
        b = self._coordinates.get(target or "")
        if a is None or b is None:
            if source is not None and self._coordinates:
                return "host"
            return self._single
        names = ("data", "pipeline", "model")
        differ = [name for name, i, j in zip(names, a, b) if i != j]
        return differ[0] if len(differ) == 1 else "several"


def _device_of(strategy):
    """The device of a step that is on a single one."""
    if hasattr(strategy, "device_grid"):
        return strategy.device_grid[0][0][0]
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return strategy.extended.worker_devices[0]
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _bytes_of_row(spec):
    return int(np.prod(spec.shape[1:])) * spec.dtype.size


def _checked(steps):
    received = f"`steps` must be {_RULE}. Received: steps={steps!r}."
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise TypeError(received)
    if len(steps) != 2:
        raise ValueError(received)
    rule = f"two integers from 0: {steps!r}"
    start, stop = (check_integer("steps", each, 0, rule) for each in steps)
    if start >= stop:
        raise ValueError(received)
    return start, stop
