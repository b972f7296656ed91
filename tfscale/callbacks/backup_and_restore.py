"""Saves a run, and resumes it after an interruption."""

import logging
import signal
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tfscale.backup.files.folder import BackupFolder
from tfscale.backup.files.folder import logged
from tfscale.backup.run import Run
from tfscale.backup.schedule import SaveSchedule
from tfscale.backup.stopping import StopSignals
from tfscale.backup.worker_group import WorkerGroup
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.integers import check_integer

# Callbacks whose `fit` runs, or ended by an error unknown to them.
_entered: "weakref.WeakSet[BackupAndRestore]" = weakref.WeakSet()


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes an interrupted `fit` at the exact step.

    A drop-in replacement for Keras' callback of that name. A run that was
    killed, any number of times and at any point, ends bit for bit where one
    that was never interrupted ends (as far as its operations are
    deterministic). Start the same program again.

    Saved are weights, optimizer, the running metrics, the state of the other
    callbacks, `History`, the positions in training and validation data, and
    all random states. Values are held, and written while training goes on; a
    save that failed is raised at the next step, and logged after the last one.

    A program may have several calls of `fit` with one folder, which are told
    apart by their number among those that end well: restarted, each continues
    from its own backups. If a restarted program skips some, give each a folder
    of its own.

    On a signal, SIGTERM unless told otherwise, the run is saved at the next
    step and the process ends. After the last step it ends when `fit` does, and
    the backups are kept. A second signal is for the earlier handlers, and ends
    the process at once if there are none. So is each signal to a forked child.

    Workers save and stop together, at the same step: each writes the values
    that only it has, worker 0 the rest. They need one folder that all of them
    see.

    Args:
        backup_dir: Folder of the backups; any path of `tf.io.gfile`. One job at
            a time may use it.
        save_freq: `"epoch"`, a number of batches, or `"auto"`: the first save
            after a minute, later ones as often as `overhead` allows.
        keep: How many backups to keep.
        delete_checkpoint: Whether to remove the backups when `fit` has ended.
        overhead: With `"auto"`, the share of the time that saves may take,
            from the beginning of each to its last byte.
        signals: Numbers of the signals that ask the run to stop.
        exit_code: The exit code of the process then.

    Raises:
        ValueError: If an argument makes no sense; from `fit`, if the backup is
            of another model, optimizer, data or callbacks. Nothing is changed
            then.
        BlockingIOError: From `fit`, if another job uses the folder.
        OSError: From `fit`, if the folder cannot be written to, or workers do
            not see one folder.
        tfscale.backup.files.committed.DamagedBackupError: From `fit`, if
            there are backups, and none is what was written.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> backup = BackupAndRestore(tempfile.mkdtemp(), save_freq=10)
    >>> history = model.fit(
    ...     np.ones((64, 2)), np.ones((64, 1)), verbose=0, callbacks=[backup]
    ... )

    Reference: Mohan, Phanishayee, Chidambaram: CheckFreq, FAST 2021 (the share
    of the time, and values that are held while they are written).
    """

    def __init__(
        self,
        backup_dir: str,
        save_freq: str | int = "epoch",
        keep: int = 2,
        delete_checkpoint: bool = True,
        *,
        overhead: float = 0.035,
        signals: Sequence[int] = (signal.SIGTERM,),
        exit_code: int = 128 + signal.SIGTERM,
    ):
        super().__init__()
        backup_dir = str(backup_dir)
        if not backup_dir:
            raise ValueError(
                "`backup_dir` must be a path. Received: backup_dir=''."
            )
        if save_freq not in ("epoch", "auto"):
            rule = '"epoch", "auto" or a number of batches, 1 or more'
            check_integer("save_freq", save_freq, rule=rule)
        check_integer("keep", keep, rule="a number of backups, 1 or more")
        if not 0.0 < overhead < 1.0:
            raise ValueError(
                "`overhead` must be a share of the time, between 0 and 1. "
                f"Received: overhead={overhead!r}."
            )
        self._folder = BackupFolder(backup_dir, keep)
        self._save_freq = save_freq
        self._overhead = overhead
        self._delete_checkpoint = delete_checkpoint
        self._signals = tuple(signals)
        self._exit_code = exit_code
        self._stop_signals: StopSignals | None = None
        self._run: Any = None  # a `Run`, as long as `fit` runs

    def on_train_begin(self, logs: Logs = None) -> None:
        """Finds the newest backup, from which `fit` continues."""
        for other in list(_entered):
            if other is self or other._is_over():
                other._leave()
        fit = Fit(self.model)
        self._folder.begin_fit()
        kinds = (BackupAndRestore, keras.callbacks.BackupAndRestore)
        if len(fit.callbacks_of(*kinds)) > 1:
            raise ValueError(
                "Only one callback may restore a run. Received: another "
                "BackupAndRestore in `callbacks`. Remove one."
            )
        # Its logs are complete before other callbacks read them.
        fit.callbacks.callbacks.remove(self)
        fit.callbacks.callbacks.insert(0, self)
        self._workers = WorkerGroup(self.model.distribute_strategy)
        self._workers.from_first("lock", self._folder.acquire)
        self._fit = fit
        _entered.add(self)
        self._stop_signals = StopSignals(self._signals, self._is_over)
        try:
            self._folder.be_seen(self._workers)
            self._run = Run(
                self.model,
                fit,
                self._folder,
                SaveSchedule(self._save_freq, self._overhead),
                self._stop_signals,
                self._exit_code,
                self._workers,
            )
        except BaseException:
            self._leave()
            raise
        self._stop_signals.watch()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Notes the epoch."""
        self._run.on_epoch_begin(epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Notes how far training has come."""
        self._run.on_train_batch_end(batch)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Follows validation through its data."""
        if self._run is not None:
            self._run.on_test_begin()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Follows validation through its data, batch by batch."""
        if self._run is not None:
            self._run.on_test_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Completes the logs of an epoch that resumed after its last step."""
        self._run.on_epoch_end(logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """Reports the cost of interruptions and saves; removes the backups."""
        logging.info("BackupAndRestore: %s.", self._run.end())
        self._run.stop_late()
        if self._delete_checkpoint and self._workers.index == 0:
            with logged("Backups are left, and `fit` has ended well"):
                self._folder.clear()
        self._folder.end_fit()
        self._leave()

    def stop_before_next_step(self, exit_code: int) -> None:
        """Has the run saved, and the process end, before the next step.

        It is for other callbacks of the `fit` that runs, and all workers must
        call it at the same step. Nothing is done if no step follows.

        Args:
            exit_code: The exit code of the process.
        """
        self._run.stop_before_next_step(exit_code)

    def _is_over(self):
        return not self._fit.is_running

    def _leave(self):
        """Releases folder and signals, also of a `fit` that failed."""
        signals = self._stop_signals
        if signals is not None:
            signals.restore()
        if self._run is not None:
            self._run.abandon()
        self._folder.release()
        _entered.discard(self)
        self._run = self._stop_signals = None
        if signals is not None and signals.received is not None:
            signals.pass_on(self._exit_code)  # this `fit` had failed
