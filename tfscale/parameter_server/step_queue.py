"""The running steps of the workers, and the sums of their results."""

import collections
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.cluster import ports
from tfscale.cluster.cluster import Cluster

# Steps queued for each worker: few, so that callbacks are not far ahead of
# steps; enough, so that no worker waits for the chief.
_STEPS_PER_WORKER = 8
# Seconds that a step may wait for a lost worker to come back.
_SECONDS_WITHOUT_WORKERS = 600.0
# Seconds of waiting for one step after which lost workers are logged.
_SECONDS_WITHOUT_WORDS = 15.0


class StepQueue:
    """Hands steps to free workers; `sums` are of results of finished steps."""

    def __init__(self, strategy):
        self._coordinator = strategy.coordinator
        self._cluster = strategy.cluster
        self._most = _STEPS_PER_WORKER * strategy.num_workers
        self._under_way = collections.deque()
        self.sums: list[np.ndarray] | None = None
        # Otherwise TensorFlow would report this error for the next step.
        self._all_went_well = True

    def put(self, function: Callable[..., Any], *args: Any) -> None:
        """Queues a step; waits while too many are queued."""
        self._all_went_well = False
        with explained(self._cluster):
            result = self._coordinator.schedule(function, args=args)
        self._under_way.append(result)
        # The first step is awaited, so that there are results to report.
        while self.sums is None or len(self._under_way) > self._most:
            self._add_up()

    def run(self, function: Callable[..., Any], batches: list[Any]) -> list:
        """Runs a function on batches and returns its results, in order."""
        # Steps may be under way: a callback of `fit` may predict.
        went_well_before, self._all_went_well = self._all_went_well, False
        with explained(self._cluster):
            results = [
                self._coordinator.schedule(function, args=(batch,))
                for batch in batches
            ]
        outputs = [self._wait_for(result.get) for result in results]
        self._all_went_well = went_well_before
        return outputs

    def join(self) -> None:
        """Returns when all steps are finished and their results summed."""
        while self._under_way:
            self._add_up()
        self._all_went_well = True

    def reset(self) -> None:
        """Starts again at zero, without failed steps."""
        if not self._all_went_well:
            self._under_way.clear()
            with contextlib.suppress(tf.errors.OpError):
                self._coordinator.join()
            self._all_went_well = True
        self.sums = None

    def _add_up(self):
        """Waits for the oldest step, always in this order."""
        found = self._wait_for(self._under_way.popleft().fetch)
        sums = self.sums or [np.zeros_like(value) for value in found]
        self.sums = [old + new for old, new in zip(sums, found)]

    def _wait_for(self, fetch):
        """The result of a step.

        TensorFlow says that a result is ready before it has arrived. If its
        worker is lost in between, the step is made again, by another worker or
        by this one once it is back.
        """
        end = time.monotonic() + _SECONDS_WITHOUT_WORKERS
        timer = threading.Timer(_SECONDS_WITHOUT_WORDS, self._say_who_is_lost)
        timer.start()
        try:
            while True:
                try:
                    with explained(self._cluster):
                        return fetch()
                except tf.errors.OpError as error:
                    lost = symbols.is_worker_failure(error)
                    if not lost or time.monotonic() > end:
                        raise
                time.sleep(0.05)
        finally:
            timer.cancel()

    def _say_who_is_lost(self):
        lost = [
            f"worker {index} at {address}"
            for index, address in enumerate(self._cluster.jobs["worker"])
            if not ports.answers(address)
        ]
        if lost:
            logging.warning(
                "Training continues once all workers are back: TensorFlow "
                "adds them together. Received: no answer from %s. Start it "
                "again at the same address, as `python -m tfscale.launch "
                "--max_restarts` does, or end the program.",
                ", ".join(lost),
            )


@contextlib.contextmanager
def explained(cluster: Cluster) -> Iterator[None]:
    """Explains the failure behind an error of TensorFlow."""
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        raise ValueError(
            "A training dataset on parameter servers must not end, because "
            "the number of steps of each worker is not known. Received: one "
            "that has ended. End it in `.repeat()`."
        ) from error
    except tf.errors.OpError as error:
        lost = _lost_server(cluster, error)
        if lost is None:
            raise
        raise ConnectionError(
            "Parameter servers must run as long as the training, because they "
            f"hold the variables. Received: {lost} is lost. See its last "
            "output. Start all processes again, from the last saved model."
        ) from error


def _lost_server(cluster, error):
    for index, address in enumerate(cluster.jobs["ps"]):
        if not ports.answers(address):
            return f"ps {index} at {address}"
    # A server may have been restarted in the meantime, without the variables.
    found = re.search(r"target /job:ps/replica:0/task:(\d+)", str(error))
    kinds = (tf.errors.UnavailableError, tf.errors.AbortedError)
    return f"ps {found[1]}" if found and isinstance(error, kinds) else None
