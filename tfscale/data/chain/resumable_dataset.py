"""The dataset of a pipeline: a `tf.data.Dataset` with a position."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale._internals import datasets
from tfscale.data.chain import chain
from tfscale.data.chain.recipe import Recipe
from tfscale.data.order.epoch_plan import with_batch_size
from tfscale.data.order.position import Position
from tfscale.data.order.position import PositionReadAhead
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
        super().__init__(datasets.variant_of(dataset))

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
        steps = self._steps_from(self._begun(start))
        return steps * self.recipe.plan.batches_per_step

    def _steps_from(self, start):
        plan = self.recipe.plan
        return plan.steps_in(plan.limit - start.index // plan.lines)

    def _begun(self, start):
        # The end of an epoch is the beginning of the next.
        if self._steps_from(start) > 0:
            return start
        return start._replace(epoch=start.epoch + 1, index=0)

    def position_after(
        self, start: PositionValue, batches: int
    ) -> PositionValue:
        """The position after `batches` of this worker from `start` on."""
        plan, start = self.recipe.plan, self._begun(start)
        steps = -(-batches // plan.batches_per_step)
        per_step = plan.global_batch * plan.lines
        left = self._steps_from(start)
        if steps < left:
            return start._replace(index=start.index + steps * per_step)
        epochs, done = divmod(steps - left, plan.num_steps)
        return start._replace(
            epoch=start.epoch + 1 + epochs, index=done * per_step
        )

    @functools.cached_property
    def read_ahead(self) -> "ResumableDataset":
        """The same for a consumer that reads ahead, and counts its batches.

        A strategy with several replicas does: see `PositionReadAhead`.
        """
        position = PositionReadAhead(self.position)
        dataset = chain.build(self.recipe, position)
        return ResumableDataset(dataset, self.recipe, self.position)

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
