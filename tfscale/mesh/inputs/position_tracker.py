"""The position of a pipeline whose batches are read ahead for replicas.

A pipeline of `tfscale.data` moves its position on when it hands out a batch.
TensorFlow reads up to four batches ahead for replicas, so a batch that was
handed out may not have been trained on. Here the position moves by the batches
that steps take, and at the end of an epoch in a loop that is one graph.
"""

import math

import tensorflow as tf


def has_position(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a pipeline of `tfscale.data`."""
    return hasattr(dataset, "position") and hasattr(dataset, "batches_left")


class PositionTracker:
    """Where an iterator began, and how many of its batches steps have taken."""

    def __init__(self, dataset, purpose):
        self._dataset = dataset
        self._position = self._start = dataset.position.value
        if purpose in ("evaluate", "predict"):
            self._start = self._start._replace(index=0)
        # The batches of a probe, as in `Position`.
        self._num_probes = {"fit": 0, None: 1}.get(purpose, math.inf)
        self._left = dataset.batches_from(self._start)
        self._end = dataset.position_after(self._start, self._left)
        if self._position != self._start:  # training is within an epoch
            self._end = self._position
        self._num_assigned = dataset.position.num_assigned
        self._count = 0

    def count_batches(self, count):
        """Counts batches that a step takes.

        An iterator reads its start with its first batch, so the position stays
        until the second one is requested.
        """
        has_begun = self._count > 0
        self._count = min(self._count + count, self._left)
        if has_begun:
            self.move_position()

    def move_position(self):
        """Sets the position by the number of batches."""
        if not self._count:
            return
        after = self._position
        if self._count == self._left:
            after = self._end
        elif self._count > self._num_probes:
            after = self._dataset.position_after(self._start, self._count)
        # A position set by other code stays; the end may have been read ahead.
        position = self._dataset.position
        is_ours = position.num_assigned == self._num_assigned
        if is_ours and position.value in (self._position, self._end):
            position.assign(**after._asdict())
            self._num_assigned += 1
        self._position = after
