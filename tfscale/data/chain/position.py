"""Where a run stands in its data: three integers, read and set."""

from typing import NamedTuple

import tensorflow as tf

from tfscale import _internals


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
    """The place from which the next iterator of a pipeline reads.

    `index` counts the records, over all workers, that training has consumed of
    `epoch`. Whoever consumes batches sets it, because nobody else knows how
    many were consumed: what prefetching has read ahead is not what was
    trained on. A pipeline moves it by itself only when it hands out the last
    batch of an epoch, to the beginning of the next one; therefore `fit` over
    many epochs needs nothing from the user. Under a strategy Keras also makes
    iterators only to see what a batch is like, which are read ahead, and to the
    end of a short epoch: those move nothing.

    To continue `fit` in the middle of an epoch, give it the rest of that epoch
    first, and say that it is the rest: Keras expects a whole epoch otherwise,
    warns when it ends early, and counts an optimizer step that was none.

        model.fit(pipeline.take(pipeline.batches_left), epochs=1)
        model.fit(pipeline, epochs=...)

    A `Position` is saved and restored by `tf.train.Checkpoint`, and means the
    same at any number of workers.

    Args:
        seed: Integer, from which the order and the augmentation are drawn.

    Attributes:
        num_assigned: Integer: how often `assign` was called.

    Example:

    >>> position = Position(seed=7)
    >>> position.assign(epoch=2, index=96)
    >>> position.value
    PositionValue(seed=7, epoch=2, index=96)
    """

    def __init__(self, seed: int):
        super().__init__(name="position")
        self.num_assigned = 0
        # On the host and of no strategy: a mirrored variable would be read
        # from a device that tf.data functions do not run on.
        with tf.init_scope(), tf.device("CPU:0"):
            self._state = _internals.ResourceVariable(
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
        """Sets what is given; iterators made from now on begin there.

        Args:
            seed: Integer or None.
            epoch: Integer, 0 or more, or None.
            index: Integer, 0 or more, or None: records of the epoch already
                consumed, over all workers. The end of an epoch is the
                beginning of the next.

        Raises:
            ValueError: If `epoch` or `index` is negative.
        """
        for name, value in (("epoch", epoch), ("index", index)):
            if value is not None and value < 0:
                raise ValueError(
                    f"A position's `{name}` must be 0 or more. "
                    f"Received: {name}={value}."
                )
        self.num_assigned += 1
        old = self.value
        new = (seed, epoch, index)
        self._state.assign(
            [o if n is None else int(n) for o, n in zip(old, new)]
        )

    def begin(self) -> tf.Tensor:
        """Where an iterator begins, and whether it moves on; for tf.data.

        Returns:
            int64 tensor of shape `(4,)`: seed, epoch, index, and 1, or 0 if
            Keras has the iterator only to see what a batch is like.
        """
        moves = tf.constant(1, tf.int64)
        if not _is_read_elsewhere():
            looked = _internals.asked_of_python(self._is_looked_at)
            moves -= tf.cast(looked, tf.int64)
        return tf.concat([self._state.read_value(), moves[tf.newaxis]], 0)

    def _is_looked_at(self):
        return any(
            self in positions_of(dataset)
            for dataset in _internals.data_keras_looks_at()
        )

    def end_epoch(self, epoch: tf.Tensor, over: tf.Tensor) -> None:
        """Moves on from `epoch` if it is `over`; for tf.data.

        Args:
            epoch: int64 scalar tensor.
            over: int64 scalar tensor, 1 or 0.
        """
        _, at_epoch, at_index = tf.unstack(self._state.read_value())
        # A sum rather than a condition: it adds nothing to what others
        # assign meanwhile, and starts faster; see `stream`.
        move = tf.stack([0 * over, epoch + 1 - at_epoch, -at_index]) * over
        self._state.assign_add(move, read_value=False)


def _is_read_elsewhere():
    """Whether other processes read data, in which nobody knows our Python.

    Those of parameter servers do; their data has no end.
    """
    devices = tf.config.list_logical_devices()
    return any(tf.DeviceSpec.from_string(d.name).job == "ps" for d in devices)


def positions_of(dataset: tf.data.Dataset) -> list[Position]:
    """The positions of all pipelines that a dataset is made of."""
    position = getattr(dataset, "position", None)
    if isinstance(position, Position):
        return [position]
    return [
        one
        for part in _internals.inputs_of(dataset)
        for one in positions_of(part)
    ]
