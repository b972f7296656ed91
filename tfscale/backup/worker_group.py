"""The workers of a `fit`, which save and stop together.

Between steps they agree by a sum of a few integers. Messages about files, which
are written during steps, go through their `Coordination`: collectives must have
the order of the program.

    worker 0    folder ─┐  own files ──────────┬─► manifest: the backup exists
    worker 1            └► own files ─► report ┘
"""

import itertools
import time

import tensorflow as tf

from tfscale.cluster.coordination import Coordination

# Workers agree this often, as measured by the time of a step.
_SECONDS = 0.1
_MAX_STEPS = 1_000
_fits = itertools.count()


class WorkerGroup(Coordination):
    """The workers of a `fit`; a single process is a group of one.

    Worker 0 writes what is written once.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._workers = getattr(strategy.extended, "workers", None)
        if self._workers is None:
            super().__init__()
        else:
            super().__init__(
                self._workers.count,
                self._workers.index,
                self._workers.check_all_there,
                # The same program runs in all.
                scope=f"backup/{next(_fits)}",
            )
        self._steps = 0  # since the last agreement
        self._interval = 1
        self._since = time.monotonic()

    def agree(
        self, is_asked: bool, is_due: bool, is_last: bool = False
    ) -> tuple[bool, bool]:
        """Whether all stop now, and whether all save; between two steps.

        All stop if one of them is asked to, and save if worker 0 finds it due.
        They agree at most ten times a second, which costs little with short
        steps.
        """
        if self._workers is None:
            return is_asked, is_due
        self._steps += 1
        if self._steps < self._interval and not is_last:
            return False, False
        now = time.monotonic()
        per_step = max((now - self._since) / self._steps, 1e-9)
        interval = min(max(int(_SECONDS / per_step), 1), _MAX_STEPS)
        values = [int(is_asked), int(is_due), interval]
        if self.index:
            values[1:] = 0, 0  # of worker 0 only
        (total,) = self._workers.all_reduce([tf.constant(values, tf.int32)])
        stop, save, self._interval = (int(x) for x in total)
        self._steps, self._since = 0, time.monotonic()
        return bool(stop), bool(save)
