"""The dataset of a pipeline: a `tf.data.Dataset` with a position."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale.data.chain import chain
from tfscale.data.chain.recipe import Recipe
from tfscale.data.order.epoch_plan import with_batch_size
from tfscale.data.order.position import Position
from tfscale.data.order.position import PositionValue
from tfscale.data.order.position import positions_of


class ResumableDataset(tf.data.Dataset):
    """A `tf.data.Dataset` with a position and its recipe.

    `fit`, `tf.distribute` and further `map`s take it as any dataset. Use
    `tfscale.data.pipeline` to create one.

    Attributes:
        position: `Position`; set it to continue a run where it stopped.
        recipe: `Recipe`, all arguments and decisions.

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
        super().__init__(tf.data.experimental.to_variant(dataset))

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
        """Integer: the batches of an epoch that begins at the position."""
        return self.batches_from(self.position.value)

    def batches_from(self, start: PositionValue) -> int:
        """The batches of an epoch that begins at `start`."""
        plan = self.recipe.plan
        return plan.start(*start).steps * plan.batches_per_step

    def position_after(
        self, start: PositionValue, batches: int
    ) -> PositionValue:
        """The position after `batches` of this worker from `start` on."""
        plan = self.recipe.plan
        begun = plan.start(*start)
        epoch, first = begun.epoch, begun.first
        steps = -(-batches // plan.batches_per_step)
        if steps >= begun.steps:
            epochs, steps = divmod(steps - begun.steps, plan.num_steps)
            epoch, first = epoch + 1 + epochs, 0
        index = (first + steps * plan.global_batch) * plan.lines
        return start._replace(epoch=epoch, index=index)

    def with_batch_size(self, batch_size: int) -> "ResumableDataset":
        """The same records in the same order, in batches of another size.

        It shares position and cache with this one: records that were consumed
        of an epoch stay consumed.

        Args:
            batch_size: Integer, the global batch size.

        Raises:
            ValueError: If workers would not get equal batches.

        Example:

        >>> import numpy as np
        >>> from tfscale import data
        >>> pipeline = data.pipeline(
        ...     data.arrays(np.arange(5)), batch_size=2, shuffle=False
        ... )
        >>> larger = pipeline.with_batch_size(3)
        >>> [batch.tolist() for batch in larger.as_numpy_iterator()]
        [[0, 1, 2], [3, 4]]
        >>> pipeline.position.value.epoch
        1
        """
        plan = with_batch_size(self.recipe.plan, batch_size)
        recipe = dataclasses.replace(self.recipe, plan=plan)
        dataset = chain.build(recipe, self.position)
        return ResumableDataset(dataset, recipe, self.position)


@contextlib.contextmanager
def positions_kept(dataset: tf.data.Dataset) -> Iterator[None]:
    """Restores the positions of all pipelines in a dataset at the end."""
    positions = (
        positions_of(dataset) if isinstance(dataset, tf.data.Dataset) else []
    )
    before = [position.value for position in positions]
    try:
        yield
    finally:
        for position, value in zip(positions, before, strict=True):
            position.assign(**value._asdict())
