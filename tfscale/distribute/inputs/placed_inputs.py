"""Datasets with a position, whose batches are read ahead for several replicas.

A pipeline of `tfscale.data` moves its position on when it hands out a batch.
TensorFlow reads up to four batches ahead for replicas, so what has been handed
out has not been trained on: what is taken is counted here, and the position
moves by that. In a loop that is one graph nobody can count; there it moves at
the end of an epoch.
"""

import math
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place


def source_of(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """What to distribute, of a dataset that is given to `placed` afterwards."""
    return dataset.read_ahead if _has_position(dataset) else dataset


def placed(distributed: Any, dataset: tf.data.Dataset) -> Any:
    """A distributed dataset that keeps the position of its source true.

    Args:
        distributed: A `tf.distribute.DistributedDataset` of `source_of`.
        dataset: What it was made of; without a position nothing is done.
    """
    if _has_position(dataset):
        in_place.put(
            distributed, _PlacedDataset, placed_source=dataset, last_taker=None
        )
    return distributed


def _has_position(dataset):
    return hasattr(dataset, "position") and hasattr(dataset, "batches_left")


# No `in_place.Mixin`: TensorFlow's classes, too, are of these bases first, and
# without them Python does not put the one in the place of the other.
class _PlacedDataset(Iterable):
    def __iter__(self):
        if not tf.executing_eagerly():
            return super().__iter__()
        purpose, epochs = _internals.reader_of(self) or (None, None)
        if purpose == "look":
            return super().__iter__()
        if self.last_taker is not None:
            self.last_taker.settle()
        self.last_taker = _Taker(self.placed_source, purpose)
        iterator = super().__iter__()
        if epochs is None:
            in_place.put(iterator, _CountedIterator, taker=self.last_taker)
        else:
            _internals.tell_steps(epochs, self.last_taker.taken)
        return iterator


class _CountedIterator(Iterator):
    def __next__(self):
        batch = super().__next__()
        self.taker.taken(1)
        return batch


class _Taker:
    """Where an iterator began, and how many batches were taken of it.

    Args:
        dataset: `ResumableDataset`.
        purpose: What Keras reads it for, or None for a loop.
    """

    def __init__(self, dataset, purpose):
        self._dataset = dataset
        self._at = self._start = dataset.position.value
        if purpose in ("evaluate", "predict"):
            self._start = self._start._replace(index=0)
        # As `Position` says of who moves it.
        self._num_looks = {"fit": 0, None: 1}.get(purpose, math.inf)
        self._left = dataset.batches_from(self._start)
        self._end = dataset.position_after(self._start, self._left)
        if self._at != self._start:  # training is within an epoch
            self._end = self._at
        self._num_assigned = dataset.position.num_assigned
        self._count = 0

    def taken(self, count):
        """Batches were taken, or are about to be.

        An iterator reads where it begins with its first batch, so the position
        stays until the second one is asked for.
        """
        has_begun = self._count > 0
        self._count = min(self._count + count, self._left)
        if has_begun:
            self.settle()

    def settle(self):
        """Puts the position where it is by what was taken."""
        if not self._count:
            return
        after = self._at
        if self._count == self._left:
            after = self._end
        elif self._count > self._num_looks:
            after = self._dataset.position_after(self._start, self._count)
        # What somebody else has set stays; the end may have been read ahead.
        position = self._dataset.position
        is_ours = position.num_assigned == self._num_assigned
        if is_ours and position.value in (self._at, self._end):
            position.assign(**after._asdict())
            self._num_assigned += 1
        self._at = after
