"""A dataset that is distributed over replicas, and its iterator.

    dataset ─► batches of replicas ─► read ahead ─► iterator ─┬─► replica 0
                                                              ├─► replica 1
                                                              └─► ...

On CPUs all replicas take batches from one ordinary iterator of tf.data.
TensorFlow's iterator for several devices has one more for each of them, and in
it a `GeneratorDataset`, which makes glibc map memory anew for all of more than
128 KiB (`ApplyPython311MemoryPatch`, TensorFlow 2.21).
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._internals import datasets
from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.mesh.inputs import common_configuration
from tfscale.mesh.inputs import rows_by_speed


class MeshIterator(datasets.SharedIterator):
    """Takes the batches of a step."""

    def __init__(self, iterator, is_ordinary, call=None):
        super().__init__(iterator, is_ordinary)
        is_probe = call is not None and call.stage == "probe"
        self._probing = call.model.distribute_strategy if is_probe else None
        self._must_have_batch = is_probe or (
            call is not None and call.purpose == "predict"
        )

    def __next__(self):
        try:
            batch = datasets.with_none(super().__next__())
        except StopIteration:
            if self._must_have_batch:
                raise ValueError(
                    "`fit`, `evaluate` and `predict` need a batch. Received: "
                    "data without any. Look for a filter, a `take` or "
                    "`drop_remainder=True` that leaves nothing, or for an "
                    "exhausted generator."
                ) from None
            raise
        self._must_have_batch = False
        if self._probing is not None:
            # Keras would not, if any of it is None.
            return self._probing.reduce("MEAN", batch, axis=None)
        return batch

    def __del__(self):
        """Releases TensorFlow's iterator in a thread of its own.

        tf.data's autotuner sleeps 10 ms, then 20, 40 and so on up to a minute.
        Often the end does not wake it, because the cancellation calls it before
        it sets its flag (`CancellationManager::StartCancelWithStatus`). The
        release then takes up to as long as the iterator has lived.
        """
        if not sys.is_finalizing():  # when no thread can start
            threading.Thread(target=self._iterators.clear).start()


class _MeshData:
    """The members in which both classes differ from TensorFlow's.

    Attributes:
        is_probed: Whether Keras' probe may read a batch, and not only specs.
        has_ordinary_iterator: Whether it was made with `ORDINARY_ITERATOR`.
        workers: The `Workers` that take its batches together, or None.
    """

    is_probed = True
    has_ordinary_iterator = False
    workers: Any = None

    def __iter__(self):
        is_ordinary = self.has_ordinary_iterator
        if not tf.executing_eagerly():
            return datasets.SharedIterator(super().__iter__(), is_ordinary)
        call = fitting.keras_call()
        if not fitting.is_read_by(self, call):
            return MeshIterator(super().__iter__(), is_ordinary)
        if self.workers is not None:
            common_configuration.check(call, self.workers)
        if call.stage == "probe" and not self.is_probed:
            # Of a distributed dataset that a user has made. Epochs refer
            # weakly to their iterator, which a list's does not allow.
            return (fitting.element_spec_of(epochs) for epochs in [call.epochs])
        return MeshIterator(super().__iter__(), is_ordinary, call)


class MeshDataset(_MeshData, symbols.DistributedDataset):
    """A `tf.distribute.DistributedDataset` of one dataset.

    Attributes:
        given_dataset: The dataset, as it was given.
        mapped: Returns a `MeshDataset` like this one, of what a function makes
            of the batches before they are divided.
    """

    given_dataset: tf.data.Dataset
    mapped: Callable[[Callable[[tf.data.Dataset], tf.data.Dataset]], Any]

    def _make_rebatch_fn(self, dataset, *args):
        config = self._strategy.extended.config
        speeds = rows_by_speed.speeds_for(dataset, config)
        if speeds is None:
            return super()._make_rebatch_fn(dataset, *args)

        def by_speed(dataset, worker):
            del worker
            batches = rows_by_speed.divided(
                dataset, speeds, config.local_shards
            )
            return batches.prefetch(config.num_replicas)

        return by_speed


class MeshDatasetOfPython(MeshDataset):
    """A `MeshDataset` whose batches are read when a step takes them.

    TensorFlow reads a batch ahead after it has cut batches for replicas. A
    generator then lacked batches that no step had taken, and the workers of a
    `PyDataset` were asked after Keras had stopped them.
    """

    def _make_rebatch_fn(self, *args):
        rebatch = super()._make_rebatch_fn(*args)

        def without_prefetch(dataset, worker):
            (batches,) = datasets.inputs_of(rebatch(dataset, worker))
            return batches

        return without_prefetch


class MeshDatasetFromFunction(
    _MeshData, symbols.DistributedDatasetsFromFunction
):
    """A `tf.distribute.DistributedDataset` of batches of replicas.

    Attributes:
        batches_per_step: How many batches the replicas here take in a step.
    """

    batches_per_step = 1

    @property
    def cardinality(self):
        """The length in steps; Keras would expect a step for each batch."""
        count = int(super().cardinality)
        return count if count < 0 else -(-count // self.batches_per_step)
