"""The position of a pipeline whose batches are read ahead for replicas.

A pipeline of `tfscale.data` moves its position on when it hands out a batch.
TensorFlow reads up to four batches ahead for replicas, so what has been handed
out has not been trained on: what is taken is counted here, and the position
moves by that. In a loop that is one graph nobody can count; there it moves at
the end of an epoch.
"""

import math

import tensorflow as tf


def has_position(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a pipeline of `tfscale.data`."""
    return hasattr(dataset, "position") and hasattr(dataset, "batches_left")


class PositionTracker:
    """Where an iterator began, and how many batches were taken of it."""

    def __init__(self, dataset, purpose):
        self._dataset = dataset
        self._position = self._start = dataset.position.value
        if purpose in ("evaluate", "predict"):
            self._start = self._start._replace(index=0)
        # As `Position` says of who moves it.
        self._num_probes = {"fit": 0, None: 1}.get(purpose, math.inf)
        self._left = dataset.batches_from(self._start)
        self._end = dataset.position_after(self._start, self._left)
        if self._position != self._start:  # training is within an epoch
            self._end = self._position
        self._num_assigned = dataset.position.num_assigned
        self._count = 0

    def count_batches(self, count):
        """Batches were taken, or are about to be.

        An iterator reads where it begins with its first batch, so the position
        stays until the second one is asked for.
        """
        has_begun = self._count > 0
        self._count = min(self._count + count, self._left)
        if has_begun:
            self.move_position()

    def move_position(self):
        """Puts the position where it is by what was taken."""
        if not self._count:
            return
        after = self._position
        if self._count == self._left:
            after = self._end
        elif self._count > self._num_probes:
            after = self._dataset.position_after(self._start, self._count)
        # What somebody else has set stays; the end may have been read ahead.
        position = self._dataset.position
        is_ours = position.num_assigned == self._num_assigned
        if is_ours and position.value in (self._position, self._end):
            position.assign(**after._asdict())
            self._num_assigned += 1
        self._position = after
