"""The position of a run in its data: three integers."""

from typing import NamedTuple

import tensorflow as tf

from tfscale._internals import datasets as tf_datasets
from tfscale.data.order.epoch_plan import EpochPlan
from tfscale.data.order.epoch_plan import EpochStart
from tfscale.graphs.noting_scope import plain_variable

_NO_END = (1 << 63) - 1
_AFTER_THE_END = (
    "A position's `index` must not be after the end of an epoch. Received: "
    "index={}, and an epoch ends at {}."
)


class PositionValue(NamedTuple):
    """The three integers of a `Position`.

    Example:

    >>> PositionValue(seed=0, epoch=1, index=64).index
    64
    """

    seed: int
    epoch: int
    index: int  # type: ignore[assignment]  # tuples have a method `index`


class Position(tf.Module):
    """Where the next iterator of a pipeline begins to read.

    An iterator begins at the position, and with its first batch it moves the
    position to the beginning of the next epoch. So an iterator that is created
    later reads a later epoch, in whatever way the earlier one ended: each epoch
    of `fit`, the next `fit`, a validation, or a look at one batch.

    `index` counts the records of `epoch`, over all workers, that training has
    consumed. Code that counts sets it: `BackupAndRestore` does, and a loop does
    by `position_after`:

        start = pipeline.position.value
        for step, batch in enumerate(pipeline, 1):
            ...
            here = pipeline.position_after(start, step)
            pipeline.position.assign(**here._asdict())

    To continue `fit` in the middle of an epoch, first give it the rest of that
    epoch: otherwise Keras expects a whole epoch, warns when it ends early, and
    counts an optimizer step that did not happen. Or begin the epoch again, with
    `assign(index=0)`.

        model.fit(pipeline.take(pipeline.batches_left), epochs=1)
        model.fit(pipeline, epochs=...)

    `tf.train.Checkpoint` saves and restores a `Position`, which means the same
    with any number of workers.

    Args:
        seed: Integer, from which the order and the augmentation are drawn.
        end: Integer or None: where the last batch of an epoch ends, the largest
            `index`.

    Example:

    >>> position = Position(seed=7)
    >>> position.assign(epoch=2, index=96)
    >>> position.value
    PositionValue(seed=7, epoch=2, index=96)
    """

    def __init__(self, seed: int, end: int | None = None):
        super().__init__(name="position")
        self._end = _NO_END if end is None else end
        # On the host, outside of strategies: tf.data functions cannot read a
        # mirrored variable from another device.
        self._state = plain_variable(
            [seed, 0, 0], "CPU:0", dtype=tf.int64, name="position"
        )

    @property
    def value(self) -> PositionValue:
        """The position as a `PositionValue` of Python integers."""
        return PositionValue(*self._state.numpy().tolist())

    def assign(
        self,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        index: int | None = None,
    ) -> None:
        """Sets some of the three; later iterators begin there.

        Args:
            seed: Integer or None.
            epoch: Integer, 0 or more, or None.
            index: Integer, 0 or more, or None: consumed records of the epoch,
                over all workers. The end of an epoch is the beginning of the
                next.

        Raises:
            ValueError: If `epoch` or `index` is negative, or `index` is after
                the end of an epoch.
        """
        for name, value in (("epoch", epoch), ("index", index)):
            if value is not None and value < 0:
                raise ValueError(
                    f"A position's `{name}` must be 0 or more. "
                    f"Received: {name}={value}."
                )
        if index is not None and index > self._end:
            raise ValueError(
                f"{_AFTER_THE_END.format(index, self._end)} A later epoch is "
                "`epoch=`."
            )
        old = self.value
        new = (seed, epoch, index)
        self._state.assign(
            [o if n is None else int(n) for o, n in zip(old, new)]
        )

    def begin(self, plan: EpochPlan) -> EpochStart:
        """The beginning of an iterator, in int64 tensors; for tf.data.

        The next iterator begins with the epoch after.
        """
        start = self.start(plan)
        # No assignment, by which random layers move their seeds.
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._state.handle,
            indices=[1, 2],
            updates=[start.epoch + 1, 0],
        )
        return start

    def start(self, plan: EpochPlan) -> EpochStart:
        """The beginning of the next iterator; for tf.data."""
        seed, epoch, index = tf.unstack(self._state.read_value())
        start = plan.start(seed, epoch, index, minimum=tf.minimum)
        is_within = index <= self._end, _AFTER_THE_END, [index, self._end]
        rules = [is_within, *plan.rules_of_end(start.first)]
        checks = [
            tf.raw_ops.Assert(
                condition=condition, data=[tf.strings.format(error, numbers)]
            )
            for condition, error, numbers in rules
        ]
        with tf.control_dependencies(checks):
            return EpochStart(*map(tf.identity, start))


def positions_of(dataset: tf.data.Dataset) -> list[Position]:
    """The positions of all pipelines in a dataset."""
    position = getattr(dataset, "position", None)
    if isinstance(position, Position):
        return [position]
    return [
        one
        for each in tf_datasets.inputs_of(dataset)
        for one in positions_of(each)
    ]
