"""Datasets with a position, whose batches are read ahead for several replicas.

A pipeline of `tfscale.data` moves its position on when it hands out the last
batch of an epoch. TensorFlow reads up to four batches ahead for replicas: by
that a short epoch is over for who has looked at its first batch. So what is
taken batch by batch is counted, and if an iterator was let go of before its
last batch, the position is put back where that iterator began.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import in_place


def placed(distributed: Any, dataset: tf.data.Dataset) -> Any:
    """A distributed dataset that keeps the position of its source true.

    Args:
        distributed: A `tf.distribute.DistributedDataset`.
        dataset: What it was made of; without a position nothing is done.
    """
    if hasattr(dataset, "position") and hasattr(dataset, "batches_left"):
        in_place.put(
            distributed, _PlacedDataset, placed_source=dataset, last_taker=None
        )
    return distributed


# No `in_place.Mixin`: TensorFlow's classes, too, are of these bases first, and
# without them Python does not put the one in the place of the other.
class _PlacedDataset(Iterable):
    def __iter__(self):
        if not tf.executing_eagerly():
            return super().__iter__()
        if self.last_taker is not None:
            self.last_taker.put_back()
        self.last_taker = _Taker(self.placed_source)
        iterator = super().__iter__()
        in_place.put(iterator, _CountedIterator, taker=self.last_taker)
        return iterator


class _CountedIterator(Iterator):
    def __next__(self):
        batch = super().__next__()
        self.taker.taken()
        return batch


class _Taker:
    """Where an iterator began, and how many batches were taken one by one."""

    def __init__(self, dataset):
        self._position = dataset.position
        self._start = dataset.position.value
        self._num_assigned = dataset.position.num_assigned
        self._left = dataset.batches_left
        self._count = 0

    def taken(self):
        self._count += 1

    def put_back(self):
        position, start = self._position, self._start
        moved = start._replace(epoch=start.epoch + 1, index=0)
        if (
            0 < self._count < self._left
            and position.num_assigned == self._num_assigned
            and position.value == moved
        ):
            position.assign(**start._asdict())
