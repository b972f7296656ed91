"""A `fit` that is saved and continued between two of its steps.

    fit        on_epoch_begin  ─► step 0 ─► step 1 ─► ... ─► validation
                    epochs ▲ between_steps(0)  ▲ between_steps(1)
    a run that is continued:
               restore, skip finished steps, and only then the next step

Between steps, all callbacks have ended one step and none has begun the next.
The run is restored after each `on_train_begin` and `on_epoch_begin`, in which
callbacks reset themselves.
"""

import dataclasses
import functools
import logging
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.adapters.epochs import follow
from tfscale.adapters.function import trace
from tfscale.backup import identity
from tfscale.backup.exactness import warn_of_inexact
from tfscale.backup.exactness import warn_of_shared
from tfscale.backup.export import config_of
from tfscale.backup.files import json_arrays
from tfscale.backup.files.committed import open_backup
from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.files.folder import logged
from tfscale.backup.files.tensor_shards import TensorShard
from tfscale.backup.files.writer import Writer
from tfscale.backup.report import Report
from tfscale.backup.schedule import SaveSchedule
from tfscale.backup.state import callback_states
from tfscale.backup.state import random_states
from tfscale.backup.state import traced_step
from tfscale.backup.state import variables
from tfscale.backup.state.data_position import DataPosition
from tfscale.backup.state.validation import Validation
from tfscale.backup.stopping import StopSignals
from tfscale.backup.worker_group import WorkerGroup
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.variables.sharding import Sharding

# Writing waits for the copies of variables, which the next steps make.
_STEPS_BEFORE_WRITING = 2
_MOST_SECONDS_BEFORE_WRITING = 1.0


@dataclasses.dataclass(eq=False)
class Run:
    """A `fit` in progress; the `Watcher` of its epochs."""

    model: keras.Model
    fit: dataclasses.InitVar[Fit]
    folder: BackupFolder
    schedule: SaveSchedule
    signals: StopSignals
    exit_code: int
    workers: WorkerGroup

    def __post_init__(self, fit: Fit) -> None:
        self._writer = Writer()
        self._epochs = fit.epochs
        self._saved_callbacks = [
            callback
            for callback in fit.callbacks.callbacks
            # With `verbose=0` there is none.
            if not isinstance(callback, keras.callbacks.ProgbarLogger)
        ]
        self._data = DataPosition(self._epochs)
        self._validation: Validation | None = None
        self._validation_state = None
        self._report = Report(
            None if self.workers.index else self.folder.progress_file
        )
        self._epoch = 0
        self._step = 0
        self._num_steps = 0
        self._logs_so_far: dict[str, float] | None = None
        self._asked_code: int | None = None
        self._identity = identity.identity(
            self.model, self._epochs, self._saved_callbacks, self._data
        )
        self._is_looked_at = self._validation_is_looked_at = False
        # A backup, and keys of it whose variables the first step creates.
        self._not_created: tuple[Any, list[str]] | None = None
        self._backup = self._newest()
        if self._backup is not None:
            fitting.build(self.model, fitting.element_spec_of(self._epochs))
            identity.check(
                self._backup,
                self.model,
                self.workers.index,
                self._identity,
                self._out_of_reach(fit.callbacks.params or {}),
            )
            fitting.set_initial_epoch(self.model, self._backup.state["epoch"])
        elif num_noted := self._report.noted():
            logging.warning(
                "No backup is in %r, in which %d steps of a run were noted: "
                "it begins anew.",
                self.folder.path,
                num_noted,
            )
        num_probes = int(fitting.probes_data(self.model, self._epochs))
        warn_of_inexact(self._epochs, "training", num_probes)
        callback_states.warn_of_unknown(self._saved_callbacks)
        left_out = variables.left_out(self.model)
        if left_out:
            logging.warning(
                "BackupAndRestore does not save %s: after an interruption "
                "they restart. Use `keras.random.SeedGenerator`.",
                ", ".join(left_out),
            )
        follow(self._epochs, watcher=self)

    def _newest(self):
        """The newest backup, which worker 0 chooses for all."""

        def find():
            found = self.folder.newest()
            return found and found.path

        path = self.workers.from_first("newest", find)
        return path and open_backup(path, is_verified=True)

    def _out_of_reach(self, params):
        """Why this `fit` does not come to the step of the backup, or None."""
        epoch, step = self._backup.state["epoch"], self._backup.state["step"]
        if epoch >= params.get("epochs", epoch + 1):
            return f"epochs={params['epochs']}, saved in epoch {epoch + 1}"
        count = self._epochs.steps_per_execution
        if step % count and not self._data.begins_anywhere:
            return f"steps_per_execution={count}, saved after {step} steps"
        return None

    # --- of the callback --------------------------------------------------

    def on_epoch_begin(self, epoch: int) -> None:
        """See `keras.callbacks.Callback`."""
        fitting.set_initial_epoch(self.model, None)
        self._epoch = epoch

    def on_train_batch_end(self, batch: int) -> None:
        """See `keras.callbacks.Callback`; `batch` is the last of the step."""
        count = batch + 1 - self._step
        self._step += count
        self._num_steps += count
        self._data.drawn(count)
        self.schedule.steps_ended(count)
        self._report.step_ended(count, self._num_steps)
        if not self._is_looked_at:
            self._is_looked_at = True
            traced_step.warn_of_unsaved(self.model, self.model.train_function)

    def on_test_begin(self) -> None:
        """Counts iterators over the validation data of this `fit`."""
        epochs = fitting.validation_epochs(self.model)
        if epochs is None:
            return
        if self._validation is None:
            num_probes = int(fitting.probes_data(self.model, epochs))
            self._validation = Validation(epochs, num_probes)
            warn_of_shared(self._epochs, epochs)
            if self._validation_state is not None:
                self._validation.resume(self._validation_state)
        self._validation.begin()

    def on_test_batch_end(self, batch: int) -> None:
        """See `keras.callbacks.Callback`."""
        if self._validation is None:
            return
        self._validation.ended(batch)
        if not self._validation_is_looked_at:
            self._validation_is_looked_at = True
            variables.warn_of_unsaved_in_validation(self.model)

    def on_epoch_end(self, logs: Logs) -> None:
        """Gives an epoch without a step left the logs of the steps before."""
        if logs is not None and self._logs_so_far:
            for name, value in self._logs_so_far.items():
                logs.setdefault(name, value)
        self._logs_so_far = None

    def end(self) -> str:
        """Ends a `fit` that succeeded; returns the report."""
        self._data.end()
        self._report.step_is_over(is_last=True)
        with logged("The last backup was not saved, and `fit` has ended well"):
            self._writer.wait()
        self._report.end()
        return self._report.text()

    def stop_before_next_step(self, exit_code: int) -> None:
        """Saves and ends the process then; to be called in all workers."""
        self._asked_code = exit_code

    def stop_late(self) -> None:
        """Ends the process if a signal came after the last step."""
        self.signals.restore()
        is_asked = self.signals.received is not None
        if self.workers.agree(is_asked, False, is_last=True)[0]:
            logging.warning(
                "%s came after the last step: `fit` has ended, and its backups "
                "are kept for the same program to continue from.",
                self._signal_name(),
            )
            self.signals.pass_on(self.exit_code)

    def abandon(self) -> None:
        """Ends a `fit` in any way; a save in progress is completed."""
        if self.workers.count > 1:
            self.workers.stop_waiting()  # others may be gone
        self._writer.join()
        follow(self._epochs, watcher=None)
        if self._validation is not None:
            self._validation.end()

    # --- of the epochs ----------------------------------------------------

    def iterator_made(self) -> None:
        """See `Watcher`."""
        self._data.iterator_made()

    def begin_epoch(self) -> int:
        """See `Watcher`; continues from a backup, if any."""
        self._step = 0
        # Once in an epoch: it takes longer than the rest of a save.
        self._config = functools.cache(functools.partial(config_of, self.model))
        backup, self._backup = self._backup, None
        if backup is None:
            return 0
        self._restore(backup)
        self._step = self._data.resume(
            backup.state["data_position"], backup.state["step"]
        )
        self._logs_so_far = None
        if self._step:
            results = self.model.get_metrics_result()
            # Some metrics have a value for each class.
            self._logs_so_far = {
                name: value if np.ndim(value) else float(value)
                for name, value in results.items()
            }
        return self._step

    def skip(self, iterator: Any) -> None:
        """See `Watcher`."""
        self._data.skip(iterator, self._epochs.steps_per_execution)

    def between_steps(self, step: int, iterator: Any) -> None:
        """See `Watcher`; saves if a save is due, or ends the run."""
        if self._not_created is not None:
            self._restore_created()
        self._report.step_is_over(is_last=step == 0)
        self._writer.check()
        if self._asked_code is not None:  # in all workers
            self._stop(step, "A callback's request", self._asked_code)
        is_due = self.schedule.is_due(is_first=step == 0)
        is_asked = self.signals.received is not None
        is_stopped, is_agreed = self.workers.agree(is_asked, is_due)
        if is_stopped:
            self._stop(step, self._signal_name(), self.exit_code)
        if self.schedule.is_timed:
            is_due = is_agreed
        if is_due:
            self._save(step)
        self._report.step_begins()

    def _stop(self, step, why, exit_code):
        if self._num_steps:
            self._save(step)
        self._writer.wait()
        logging.warning(
            "%s: the run is saved after %d steps, and ends.",
            why,
            self._num_steps,
        )
        self.signals.received = None  # if the program goes on all the same
        sys.exit(exit_code)

    def _signal_name(self):
        number = self.signals.received
        return f"Signal {number}" if number else "A signal of another worker"

    # --- saving and restoring ---------------------------------------------

    def _save(self, step):
        start = time.monotonic()
        self._writer.wait()  # for the save before
        self.schedule.save_begins()
        entries = variables.variables_of(self.model)
        worker, workers = self.workers.index, self.workers
        shards = variables.hold(entries, worker)
        state, arrays = json_arrays.split(
            self._state(step), f"state{worker or ''}"
        )
        for key, array in arrays.items():
            value = tf.constant(array)
            whole = Sharding(array.shape, value.dtype.size)
            shards.append(TensorShard(key, whole, (0, 0), value))
        number, folder = self._num_steps, self.folder
        schedule = self.schedule

        def write():
            folder.commit(number, shards, state, workers)
            schedule.save_ended()

        # The next step copies the held values: writing would slow it down.
        delay = _STEPS_BEFORE_WRITING * self._report.seconds_per_step
        self._writer.start(write, min(delay, _MOST_SECONDS_BEFORE_WRITING))
        self._report.saved(time.monotonic() - start)

    def _state(self, step):
        validation = self._validation_state
        if self._validation is not None:
            validation = self._validation.state()
        callbacks = self._saved_callbacks
        return {
            **self._identity,
            "model": self._config(),
            "epoch": self._epoch,
            "step": step,
            "num_steps": self._num_steps,
            "data_position": self._data.state(),
            "order": self._data.order(),
            "validation": validation,
            "random": random_states.random_states(),
            "callback_states": [*map(callback_states.state_of, callbacks)],
            "report": self._report.state,
        }

    def _restore(self, backup):
        state = json_arrays.join(
            dict(backup.state_of(self.workers.index)),
            lambda key: np.asarray(backup.read_whole(key)),
        )
        entries = variables.variables_of(self.model)
        workers = self.workers
        variables.restore(entries, backup, workers.index, workers.count)
        keys = variables.not_created(entries, backup)
        self._not_created = (backup, keys) if keys else None
        self._validation_state = state["validation"]
        self._num_steps = state["num_steps"]
        self._report.resume(state["report"], self._num_steps)
        states = state["callback_states"]
        for callback, saved in zip(self._saved_callbacks, states, strict=True):
            callback_states.set_state(callback, saved)
        random_states.set_random_states(state["random"])
        self._data.set_order(state.get("order"))

    def _restore_created(self):
        """Restores variables that exist once the step has been traced."""
        (backup, keys), self._not_created = self._not_created, None
        spec = fitting.distributed_data(self._epochs).element_spec
        trace(self.model.train_function, spec)
        entries, workers = variables.variables_of(self.model), self.workers
        entries = [entry for entry in entries if entry.key in keys]
        variables.restore(entries, backup, workers.index, workers.count)
        for key in {*keys} - {entry.key for entry in entries}:
            logging.warning("%r is in the backup, and not created.", key)
