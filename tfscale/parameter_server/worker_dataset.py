"""A dataset as Keras iterates over it: on the workers, or batch by batch here.

Steps of training take their batches from an iterator of the worker that runs
them. Steps of `evaluate` and `predict` get theirs from the chief, so that each
batch counts once and predictions come in order.

    a dataset        batch    0   1   2   3   4   5
    on worker 0 of 2          0       2       4
    on worker 1                   1       3       5
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale._internals import attributes


class PerWorkerDataset(tf.data.Dataset):
    """The datasets that a function returns for each worker, for Keras."""

    def __init__(
        self,
        function: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        num_workers: int,
    ):
        self.by_worker = [
            function(
                tf.distribute.InputContext(num_workers, worker, num_workers)
            )
            for worker in range(num_workers)
        ]
        for dataset in self.by_worker:
            if not isinstance(dataset, tf.data.Dataset):
                raise ValueError(
                    "A function that makes a worker's data must return a "
                    f"`tf.data.Dataset`. Received: {type(dataset).__name__}."
                )
        super().__init__(tf.data.experimental.to_variant(self.by_worker[0]))

    def _inputs(self):
        return [self.by_worker[0]]

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec`: a batch."""
        return self.by_worker[0].element_spec


class WorkerDataset:
    """The result of `experimental_distribute_dataset`."""

    def __init__(self, strategy, dataset: tf.data.Dataset):
        self._strategy = strategy
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec`: a batch."""
        return self._dataset.element_spec

    def __iter__(self) -> "WorkerIterator":
        return WorkerIterator(self._strategy, self._dataset)


class WorkerIterator:
    """The iterator that Keras passes to the function of a step."""

    def __init__(self, strategy, dataset: tf.data.Dataset):
        self._strategy = strategy
        self._dataset = dataset

    @functools.cached_property
    def on_workers(self) -> Any:
        """For each worker an iterator over its shard of the dataset."""
        coordinator = self._strategy.coordinator
        count = self._strategy.num_workers
        with _created_after_the_strategy():
            # Each is created on all workers, which costs little until a batch
            # is read; TensorFlow has no public way to create it on one.
            iterators = [
                iter(
                    coordinator.create_per_worker_dataset(
                        self._shard_of(w, count)
                    )
                )
                for w in range(count)
            ]
        return attributes.choose_worker_values(iterators)

    def _shard_of(self, worker, count):
        if isinstance(self._dataset, PerWorkerDataset):
            return self._dataset.by_worker[worker]
        return (
            self._dataset.shard(count, worker) if count > 1 else self._dataset
        )

    @functools.cached_property
    def _here(self) -> Iterator[Any]:
        with _created_after_the_strategy():
            return iter(self._dataset)

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> Any:
        """The next batch, on the chief."""
        return next(self._here)


@contextlib.contextmanager
def _created_after_the_strategy():
    try:
        yield
    except (
        tf.errors.FailedPreconditionError,
        tf.errors.InvalidArgumentError,
        tf.errors.NotFoundError,
    ) as error:
        raise ValueError(
            "A dataset for parameter servers must be created after the "
            "strategy, because connecting to the cluster removes earlier "
            "ones, and from operations that can be sent to another process. "
            f"Received, from TensorFlow: {str(error).splitlines()[0]} Create "
            "the strategy first; use no variables, tables or Python functions "
            "in a map."
        ) from error
