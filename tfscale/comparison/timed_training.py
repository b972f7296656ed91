"""A process that trains when it is asked to, and says how long that took.

Run by `tfscale.benchmark`, itself or through `python -m tfscale.launch`. Worker
0 takes the orders; the other workers take as many turns without.
"""

import contextlib
import dataclasses
import json
import multiprocessing.spawn
import pickle
import socket
import sys
import time
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale.cluster import cluster_from_environment
from tfscale.throughput import utilization


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to train under a strategy, and for how long.

    Attributes:
        build_model: Returns a compiled model.
        dataset: Returns batches.
        strategy: Returns a strategy, or one and a function that wraps the
            model; None is plain Keras.
        steps: Of one turn.
        turns: Those that a worker takes which has no orders.
    """

    build_model: Callable[[], keras.Model]
    dataset: Callable[[], Iterable[Any]]
    strategy: Callable[[], Any] | None
    steps: int
    turns: int


class _Clock(keras.callbacks.Callback):
    """When an epoch began, and when its last step ended."""

    def on_epoch_begin(self, epoch, logs=None):
        del epoch, logs
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        # Reading the logs waits for the last step of an accelerator.
        del epoch
        for value in (logs or {}).values():
            float(value)
        self.ended = time.perf_counter()


def _train(model, data, steps, is_first):
    """Seconds of an epoch; of the whole `fit`, which builds, if it is first."""
    clock, began = _Clock(), time.perf_counter()
    model.fit(
        data,
        steps_per_epoch=steps,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    return clock.ended - (began if is_first else clock.began)


def _built(job):
    """The model, and a dataset of its batches without end."""
    strategy, wrap = None, None
    if job.strategy is not None:
        strategy = job.strategy()
        if isinstance(strategy, tuple):
            strategy, wrap = strategy
    batches = job.dataset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = job.build_model()
        if wrap is not None:
            model = wrap(model)
    if not getattr(model, "compiled", False):
        raise ValueError(
            "`build_model` must return a compiled model, and what wraps it "
            f"must leave it compiled. Received: {model!r}."
        )
    return model, batches.repeat()


def _rows(batches):
    """Rows of the first batch."""
    batch = next(iter(batches.take(1)))
    return int(keras.tree.flatten(batch)[0].shape[0])


def _memory():
    devices = [each.name for each in tf.config.list_logical_devices()]
    return utilization.memory_bytes(devices)


def main(path: str, port: int) -> None:
    """Does the job of a file, and answers at a port of this machine."""
    cluster = cluster_from_environment()
    has_orders = cluster is None or cluster.is_chief
    if has_orders:
        wires = socket.create_connection(("localhost", port)).makefile("rw")
    with open(path, "rb") as file:
        multiprocessing.spawn.prepare(pickle.load(file))
        job = pickle.load(file)
    model, batches = _built(job)
    for number in range(job.turns):
        if has_orders and not wires.readline():
            return
        steps = job.steps if number else 1
        seconds = _train(model, batches, steps, is_first=not number)
        answer = {"seconds": seconds, "steps": steps}
        if has_orders:
            answer |= {"rows": _rows(batches), "memory_bytes": _memory()}
            wires.write(json.dumps(answer) + "\n")
            wires.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
