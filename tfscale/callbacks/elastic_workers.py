"""Trains with another number of workers in later epochs."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import fitting
from tfscale.callbacks import batch_adapter
from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.gradient_noise_scale import GradientNoiseScale
from tfscale.cluster import elastic
from tfscale.data.chain.resumable_dataset import ResumableDataset
from tfscale.fit.fit import Fit
from tfscale.fit.fit import Logs
from tfscale.integers import check_integer
from tfscale.planner.goodput import Goodput
from tfscale.planner.goodput import fitted_times

# A choice: a smaller gain is no more than noise of what is measured.
_LEAST_GAIN = 1.05


class ElasticWorkers(keras.callbacks.Callback):
    """Trains with another number of workers in later epochs.

    Where an epoch begins and `plan` has another number for it, the run is
    saved by `tfscale.callbacks.BackupAndRestore`, and all processes end with an
    exit code by which `python -m tfscale.launch --min_workers=1
    --max_workers=6` starts the program again with that number. The same happens
    at the first epoch after workers were lost: they are taken back.

    Batch size and learning rate stay as they are. `batch_size` of
    `tfscale.data.pipeline` is of all workers, so weights do not depend on their
    number. A program that makes it from the number of workers can have its
    learning rate follow by `learning_rate`.

    Args:
        plan: Numbers of workers by the epoch from which on they train, counted
            from 0, such as `{0: 2, 30: 6}`. 0 must be among the epochs. Or
            `"goodput"`: after each epoch the number that promises most
            progress per second, at most twice as many as ever, by the steps
            that were measured with each number. With `batch_sizes` of a
            `GradientNoiseScale` it counts what larger batches are worth.
        learning_rate: The factor of the learning rate after a restart with
            another batch size: `"linear"`, the ratio of the batch sizes;
            `"sqrt"`, its square root; or `"adascale"`, the gain by the noise
            that a `GradientNoiseScale` measures. None to leave it as it is.

    Raises:
        ValueError: If an argument makes no sense. From `fit`, before the first
            step: without such a launcher or without `BackupAndRestore`; for
            a number of workers outside of the launcher's, or one that does not
            divide the batch size; and if the learning rate cannot be adapted.
        SystemExit: From `fit`, to begin again with another number.

    Source: Lin, Zhang et al.: Dynamic Mini-batch SGD for Elastic Distributed
    Training (2019). Qiao et al.: Pollux (2021), section 4.

    Example: `python -m tfscale.launch --num_workers=2 --min_workers=1
    --max_workers=6 train.py`, in which `fit` has

    >>> callbacks = [
    ...     ElasticWorkers({0: 2, 30: 6}), BackupAndRestore("backups")
    ... ]
    """

    def __init__(
        self,
        plan: Mapping[int, int] | str,
        *,
        learning_rate: str | None = None,
    ):
        super().__init__()
        self.by_goodput = plan == "goodput"
        if self.by_goodput:
            plan = {0: 1}
        if not isinstance(plan, Mapping):
            raise ValueError(
                '`plan` must be a dict of epochs, or "goodput". Received: '
                f"plan={plan!r}."
            )
        rule = "epochs from 0 on with 1 worker or more each"
        for epoch, count in plan.items():
            check_integer("plan", epoch, least=0, rule=rule)
            check_integer("plan", count, rule=rule)
        if 0 not in plan:
            raise ValueError(
                "`plan` must give the number of workers for epoch 0. "
                f"Received: plan={plan!r}. Add the key 0."
            )
        if learning_rate not in (None, "linear", *batch_adapter.RULES):
            raise ValueError(
                '`learning_rate` must be "linear", "sqrt", "adascale" or None. '
                f"Received: learning_rate={learning_rate!r}."
            )
        self.plan = {} if self.by_goodput else dict(plan)
        self.learning_rate = learning_rate
        self._group: Any = None  # an `ElasticGroup`
        self._is_first_epoch = True
        # Replicas, rows of each, and seconds of a step, of each epoch.
        self._steps: list[tuple[int, int, float]] = []
        self._ends: list[float] = []

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks that each of the numbers can train."""
        self._group = elastic.elastic_group()
        if self._group is None:
            raise ValueError(
                "Only the launcher can change the number of workers. "
                "Received: ElasticWorkers in a process that was started "
                "without a range. Run `python -m tfscale.launch "
                "--min_workers=1 --max_workers=4 train.py`, or remove the "
                "callback."
            )
        self._fit = Fit(self.model)
        self._is_first_epoch = True
        self._check_numbers()
        if not self._fit.callbacks_of(BackupAndRestore):
            raise ValueError(
                "A run continues on another number of workers from its "
                "backup. Received: ElasticWorkers without BackupAndRestore. "
                "Add `tfscale.callbacks.BackupAndRestore(folder)`."
            )
        self._check_batch_size()
        self._check_learning_rate()
        if self.by_goodput and self._batch_size() is None:
            raise ValueError(
                "plan='goodput' adapts the batch size of a "
                "`tfscale.data.pipeline`. Received: plan='goodput' and other "
                "data. Pass the pipeline itself to `fit`, or a dict as `plan`."
            )

    def _check_numbers(self):
        fewest, most = self._group.fewest, min(self._group.most, elastic.MOST)
        outside = [n for n in self.plan.values() if not fewest <= n <= most]
        if outside:
            raise ValueError(
                "Each number of workers in `plan` must be in the launcher's "
                f"range. Received: plan={self.plan!r}, with {outside} outside "
                f"of --min_workers={fewest} to --max_workers={most}. Start the "
                "launcher with a larger range, or change the plan."
            )

    def _check_batch_size(self):
        size = self._batch_size()
        if size is None:
            return
        replicas = self._replicas_of_worker()
        refused = [n for n in self.plan.values() if size % (n * replicas)]
        if refused:
            raise ValueError(
                "The batch size must be a multiple of the replicas of each "
                f"number of workers. Received: batch_size={size}, which "
                f"{refused} workers with {replicas} replicas each do not "
                "divide. Change it, or the plan."
            )

    def _check_learning_rate(self):
        if self.learning_rate is None:
            return
        batch_adapter.check_learning_rate(self.model.optimizer)
        noise = self._fit.callbacks_of(GradientNoiseScale)
        if any(one.batch_sizes for one in noise):
            raise ValueError(
                "Only one callback may adapt the learning rate to the batch "
                f"size. Received: learning_rate={self.learning_rate!r} of "
                "ElasticWorkers, and GradientNoiseScale with `batch_sizes`. "
                "Set one of them to None."
            )
        if self.learning_rate == "adascale" and not noise:
            raise ValueError(
                "AdaScale needs the noise of the gradients. Received: "
                "learning_rate='adascale' without GradientNoiseScale in "
                "`callbacks`. Add it, or use 'sqrt'."
            )
        if self._batch_size() is None:
            raise ValueError(
                "The learning rate follows the batch size of a "
                "`tfscale.data.pipeline`. Received: "
                f"learning_rate={self.learning_rate!r} and other data, whose "
                "batch size a backup does not change. Leave it out."
            )

    def _replicas_of_worker(self):
        count = self.model.distribute_strategy.num_replicas_in_sync
        return max(count // self._group.present, 1)

    def _batch_size(self):
        """Rows of a batch of all workers, where they are known, or None."""
        source = fitting.source_of(self._fit.epochs)
        if not isinstance(source, ResumableDataset):
            return None
        return source.recipe.plan.global_batch * source.recipe.plan.lines

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Has the run begin again if it needs another number of workers."""
        group, is_first = self._group, self._is_first_epoch
        self._is_first_epoch = False
        self._ends = []
        if self.plan:
            count = self.plan[max(e for e in self.plan if e <= epoch)]
        else:
            count = group.planned if is_first else self._best_count()
        # Some were lost in this epoch: the others end it.
        is_left = is_first and group.present < group.planned == count
        if count != group.present and not is_left:
            (backup,) = self._fit.callbacks_of(BackupAndRestore)
            backup.stop_before_next_step(elastic.exit_code(count))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Notes when a step has ended."""
        self._ends.append(time.monotonic())

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Notes how long steps took with this number of workers."""
        size = self._batch_size()
        if size is not None and len(self._ends) > 1:
            replicas = self._replicas_of_worker() * self._group.present
            seconds = float(np.median(np.diff(self._ends)))
            self._steps.append((replicas, size // replicas, seconds))

    def _best_count(self):
        """The number of workers with the best goodput, the same in all."""
        workers = getattr(
            self.model.distribute_strategy.extended, "workers", None
        )
        count = self._count_here() if self._steps else self._group.present
        if workers is None:
            return count
        return int(workers.from_first(tf.constant(count)))

    def _count_here(self):
        each, group = self._replicas_of_worker(), self._group
        most = min(group.most, elastic.MOST)
        most = min(most, 2 * max(step[0] for step in self._steps) // each)
        times = fitted_times(*zip(*self._steps))
        found = {
            n: self._goodput_of(n * each, times)
            for n in range(group.fewest, most + 1)
        }
        now = found.get(group.present, 0.0)
        best = max(found, key=lambda n: found[n], default=group.present)
        if not found or found[best] < _LEAST_GAIN * now:
            return group.present
        logging.info(
            "ElasticWorkers: %d workers promise %.2f times the progress of %d.",
            *(best, found[best] / max(now, 1e-9), group.present),
        )
        return best

    def _goodput_of(self, replicas, times):
        """Of a number of replicas; 0 if it does not divide the batch."""
        size = self._batch_size()
        ranges = [
            (one.batch_sizes, *one.measured())
            for one in self._fit.callbacks_of(GradientNoiseScale)
            if one.batch_sizes and one.measured()[0] >= 0.0
        ]
        for (start, largest), square, variance in ranges:
            model = Goodput(times, start, square, variance / start)
            return model.best(replicas, largest)
        if size % replicas:
            return 0.0
        model = Goodput(times, size, 1.0, 0.0)
        return float(model.of(replicas, size // replicas))

    def get_state(self) -> dict[str, Any]:
        """The state in a `BackupAndRestore`: numbers and lists."""
        noise = self._fit.callbacks_of(GradientNoiseScale)
        return {
            "batch_size": self._batch_size(),
            "steps": [list(step) for step in self._steps],
            "noise": [list(one.measured()) for one in noise],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `get_state`; adapts the learning rate."""
        self._steps = [tuple(step) for step in state["steps"]]
        before, now = state["batch_size"], self._batch_size()
        if self.learning_rate is None or before in (None, now):
            return
        square, variance = (state["noise"] or [(0.0, 0.0)])[0]
        factor = batch_adapter.factor_of_learning_rate(
            self.learning_rate, before, now, square, variance
        )
        batch_adapter.scale_learning_rate(self.model.optimizer, factor)
