"""The position of a run in its data: three integers."""

from typing import NamedTuple

import tensorflow as tf

from tfscale._internals import datasets as tf_datasets
from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.data.order import epoch_plan
from tfscale.data.order.epoch_plan import EpochPlan
from tfscale.data.order.epoch_plan import EpochStart

_START = tf.TensorSpec([len(EpochStart._fields)], tf.int64)
_EPOCH_INDEX = [1, 2]  # of a state
_NO_END = (1 << 63) - 1
_AFTER_THE_END = "A position's `index` must not be after the end of an epoch."


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

    `index` counts the records, over all workers, that training has consumed of
    `epoch`. The pipeline moves it with each batch that `fit` or a loop takes,
    and to the beginning of the next epoch with the last one. So the next `fit`
    continues one that was stopped or had `steps_per_epoch`. Batches that the
    pipeline itself reads ahead do not count; those of a later `prefetch` do.

    | consumer | moves the position |
    |---|---|
    | `fit` | with each batch |
    | a loop | with each batch, from the second one on: a single batch is only
      a look |
    | `evaluate`, `predict`, validation | at the end of an epoch; each starts at
      the beginning of one, as Keras says of `validation_steps` |
    | Keras, under a strategy, to see the shapes of a batch | not at all |

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

    Attributes:
        num_assigned: Integer, the number of calls of `assign`.

    Example:

    >>> position = Position(seed=7)
    >>> position.assign(epoch=2, index=96)
    >>> position.value
    PositionValue(seed=7, epoch=2, index=96)
    """

    def __init__(self, seed: int, end: int | None = None):
        super().__init__(name="position")
        self.num_assigned = 0
        self._end = _NO_END if end is None else end
        # On the host, outside of strategies: tf.data functions cannot read a
        # mirrored variable from another device.
        with tf.init_scope(), tf.device("CPU:0"):
            self._state = symbols.ResourceVariable(
                [seed, 0, 0], dtype=tf.int64, trainable=False, name="position"
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
                f"{_AFTER_THE_END} Received: index={index}, and an epoch ends "
                f"at {self._end}. A later epoch is `epoch=`."
            )
        self.num_assigned += 1
        old = self.value
        new = (seed, epoch, index)
        self._state.assign(
            [o if n is None else int(n) for o, n in zip(old, new)]
        )

    def begin(self, plan: EpochPlan, is_read_ahead: bool) -> tf.Tensor:
        """The beginning of an iterator; for tf.data functions.

        Batches that are read ahead move the position only at the end of an
        epoch that nothing else has moved.

        Returns:
            int64 tensor, the numbers of an `EpochStart`.
        """
        if _is_read_elsewhere():
            seed, epoch, index = tf.unstack(self._state.read_value())
            end = tf.constant(self._end, tf.int64)
            tf.debugging.assert_less_equal(index, end, _AFTER_THE_END)
            return tf.stack(plan.start(seed, epoch, index, minimum=tf.minimum))
        return tf_datasets.asked_of_python(
            lambda: self._start(plan, is_read_ahead), _START
        )

    def _start(self, plan, is_read_ahead):
        seed, epoch, index = self.value
        if index > self._end:
            raise ValueError(
                f"{_AFTER_THE_END} Received: index {index} of {self._end}."
            )
        moving = self._first_moving()
        if moving == epoch_plan.LAST:
            index = 0
        if is_read_ahead and moving != epoch_plan.NONE:
            moving = epoch_plan.LAST
        start = plan.start(seed, epoch, index, moving)
        plan.check_end(start.first)
        return start

    def _first_moving(self):
        for purpose, datasets in fitting.data_keras_reads():
            if any(self in positions_of(dataset) for dataset in datasets):
                moving = {"probe": epoch_plan.NONE, "fit": 0}
                return moving.get(purpose, epoch_plan.LAST)
        return 1

    def here(self) -> tf.Tensor:
        """Epoch and index, as an int64 tensor; for tf.data."""
        return tf.raw_ops.ResourceGather(
            resource=self._state.handle, indices=_EPOCH_INDEX, dtype=tf.int64
        )

    def add(self, change: tf.Tensor) -> None:
        """Adds to epoch and index; for tf.data."""
        tf.raw_ops.ResourceScatterAdd(
            resource=self._state.handle, indices=_EPOCH_INDEX, updates=change
        )


def _is_read_elsewhere():
    """Whether parameter servers' workers read data, without this Python."""
    devices = tf.config.list_logical_devices()
    return any(tf.DeviceSpec.from_string(d.name).job == "ps" for d in devices)


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
