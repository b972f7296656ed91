"""A dataset as Keras iterates over it: on the workers, or batch by batch here.

Steps of training take their batches from an iterator of the worker that runs
them. Those of `evaluate` and `predict` get theirs from the chief, so that each
batch counts once and predictions come in order.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class WorkerDataset:
    """What `experimental_distribute_dataset` returns to Keras.

    Args:
        coordinator: Makes datasets on workers.
        dataset: A `tf.data.Dataset`.
    """

    def __init__(self, coordinator, dataset: tf.data.Dataset):
        self._coordinator = coordinator
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec`: a batch."""
        return self._dataset.element_spec

    def __iter__(self) -> "WorkerIterator":
        return WorkerIterator(self._coordinator, self._dataset)


class WorkerIterator:
    """What Keras hands to the function that makes a step.

    Args:
        coordinator: Makes datasets on workers.
        dataset: A `tf.data.Dataset`.
    """

    def __init__(self, coordinator, dataset: tf.data.Dataset):
        self._coordinator = coordinator
        self._dataset = dataset

    @functools.cached_property
    def on_workers(self) -> Any:
        """For each worker an iterator over the whole dataset."""
        with _made_behind_the_strategy():
            return iter(
                self._coordinator.create_per_worker_dataset(self._dataset)
            )

    @functools.cached_property
    def _here(self) -> Iterator[Any]:
        with _made_behind_the_strategy():
            return iter(self._dataset)

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> Any:
        """The next batch, on the chief."""
        return next(self._here)


@contextlib.contextmanager
def _made_behind_the_strategy():
    try:
        yield
    except (
        tf.errors.FailedPreconditionError,
        tf.errors.InvalidArgumentError,
        tf.errors.NotFoundError,
    ) as error:
        raise ValueError(
            "A dataset for parameter servers must be made behind the strategy "
            "(connecting to the cluster takes away what was made before), out "
            "of operations that can be written down for another process. "
            "Received: one of which TensorFlow says: "
            f"{str(error).splitlines()[0]} Make the strategy first; in a map, "
            "use no variables, tables or Python functions."
        ) from error
