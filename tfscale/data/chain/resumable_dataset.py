"""The dataset that the chain returns: a `tf.data.Dataset` that has a place."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale.data.chain.position import Position
from tfscale.data.chain.recipe import Recipe


class ResumableDataset(tf.data.Dataset):
    """A `tf.data.Dataset` with a position, and a memory of how it was made.

    `fit`, `tf.distribute` and further `map`s take it as what it is. Use
    `tfscale.data.pipeline` to make one.

    Attributes:
        position: `Position`; set it to continue a run where it stopped.
        recipe: `Recipe`, what was asked for and what was decided.

    Example:

    >>> import numpy as np
    >>> from tfscale import data
    >>> pipeline = data.pipeline(data.arrays(np.arange(3)), batch_size=2)
    >>> pipeline.position.value
    PositionValue(seed=0, epoch=0, index=0)
    >>> int(pipeline.cardinality())
    2
    """

    def __init__(
        self, dataset: tf.data.Dataset, recipe: Recipe, position: Position
    ):
        self._dataset = dataset
        self.recipe = recipe
        self.position = position
        super().__init__(_internals.variant_of(dataset))

    def _inputs(self):
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TensorSpec`: a batch."""
        return self._dataset.element_spec

    def cardinality(self) -> tf.Tensor:
        """Batches in a whole epoch, as an int64 scalar tensor.

        An epoch that is entered at a later position has fewer.
        """
        return tf.constant(self.recipe.plan.num_batches, tf.int64)

    @property
    def batches_left(self) -> int:
        """Integer: batches that an epoch entered at the position has."""
        plan = self.recipe.plan
        start = self.position.value.index // plan.lines
        steps = plan.steps_in(plan.limit - start)
        return (steps if steps > 0 else plan.num_steps) * plan.batches_per_step


@contextlib.contextmanager
def positions_kept(dataset: tf.data.Dataset) -> Iterator[None]:
    """Puts the positions of all pipelines in a dataset back in the end.

    Args:
        dataset: `tf.data.Dataset`, such as a `ResumableDataset` that was
            repeated.
    """
    positions = _positions(dataset)
    before = [position.value for position in positions]
    try:
        yield
    finally:
        for position, value in zip(positions, before, strict=True):
            position.assign(**value._asdict())


def _positions(dataset):
    if isinstance(dataset, ResumableDataset):
        return [dataset.position]
    if not isinstance(dataset, tf.data.Dataset):
        return []
    return [
        one
        for part in _internals.inputs_of(dataset)
        for one in _positions(part)
    ]
