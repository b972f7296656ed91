"""What several workers agree on, so that they make one backup together.

Between steps they agree by a sum of a few integers. What is written beside the
training they tell each other of through TensorFlow's coordination service, and
not by collectives, whose order is that of the program:

    worker 0    folder ─┐  own files ──────────┬─► manifest: the backup exists
    worker 1            └► own files ─► report ┘
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale import _internals

_MILLISECONDS = 1_000
_SECONDS = 0.1
_MAX_STEPS = 1_000
_fits = itertools.count()


class Company:
    """The workers of a `fit`; a process that is alone is one of one.

    Args:
        strategy: That of the model.

    Attributes:
        count: Number of workers.
        index: Which of them this is; worker 0 writes what is written once.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        workers = getattr(strategy.extended, "workers", None)
        self.count = workers.count if workers else 1
        self.index = workers.index if workers else 0
        # All workers run the same program.
        self._prefix = f"tfscale/backup/{next(_fits) if workers else 0}"
        self._is_over = False
        self._workers = workers
        self._steps = 0  # since it was agreed upon, and to the next time
        self._interval = 1
        self._since = time.monotonic()

    def leave(self) -> None:
        """Waits for nobody any more."""
        self._is_over = True

    # --- between two steps ------------------------------------------------

    def agree(
        self, is_asked: bool, is_due: bool, is_last: bool = False
    ) -> tuple[bool, bool]:
        """Whether all stop now, and whether all save; between two steps.

        All stop if one of them is asked to, and save if worker 0 finds it due.
        It is not agreed upon more often than ten times a second, so that it
        costs little where steps are short.

        Args:
            is_asked: Whether this one is asked to stop.
            is_due: Whether this one finds a save due.
            is_last: Whether no step follows, and it is agreed upon now.
        """
        if self._workers is None:
            return is_asked, is_due
        self._steps += 1
        if self._steps < self._interval and not is_last:
            return False, False
        now = time.monotonic()
        per_step = max((now - self._since) / self._steps, 1e-9)
        interval = min(max(int(_SECONDS / per_step), 1), _MAX_STEPS)
        own = [int(is_asked), int(is_due), interval]
        if self.index:
            own[1:] = 0, 0  # of worker 0 only
        (total,) = self._workers.all_reduce([tf.constant(own, tf.int32)])
        stop, save, self._interval = (int(x) for x in total)
        self._steps, self._since = 0, time.monotonic()
        return bool(stop), bool(save)

    # --- what one says and others wait for --------------------------------

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """What worker 0 makes, in all workers; JSON.

        Args:
            name: What it is, once for a `fit`.
            make: Called by worker 0. If it raises, all do.
        """
        if self.count == 1:
            return make()
        if self.index:
            return self._take(name, 0)
        try:
            value = make()
        except Exception as error:
            self._give(name, {"error": str(error)})
            raise
        self._give(name, {"value": value})
        return value

    def to_first(self, name: str, make: Callable[[], Any]) -> list[Any]:
        """What each worker makes, in worker 0; JSON. Its own only in others.

        Args:
            name: See `from_first`.
            make: Called by each worker. If it raises, worker 0 does too.
        """
        try:
            own = make()
        except Exception as error:
            if self.index:
                self._give(name, {"error": str(error)})
            raise
        if self.index:
            self._give(name, {"value": own})
            return [own]
        return [own, *(self._take(name, i) for i in range(1, self.count))]

    def _give(self, name, content):
        key = f"{self._prefix}/{name}/{self.index}"
        _internals.put_key_value(key, json.dumps(content))

    def _take(self, name, index):
        key = f"{self._prefix}/{name}/{index}"
        while not self._is_over:
            try:
                found = _internals.get_key_value(key, _MILLISECONDS)
            except tf.errors.OpError:
                self._workers.check_all_there()
                raise
            if found is not None:
                content = json.loads(found)
                if "error" in content:
                    raise OSError(f"Worker {index}: {content['error']}")
                return content["value"]
            self._workers.check_all_there()
        raise OSError(f"Worker {index} was waited for until `fit` had ended.")
