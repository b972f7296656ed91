"""When each batch of a dataset arrived, and how large it was.

`fit` reads a batch within its compiled step, where nothing can be timed from
outside. So the dataset notes when it hands out each batch, in a ring:

    number of the batch     0    1    2   ...   1023   1024
    row of the ring         0    1    2   ...   1023      0
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfscale.graphs.noting_scope import plain_variable

_KEPT = 1024  # more batches than are read ahead, or between two reads
_NUM_COLUMNS = 7
_WITH_ROWS = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec
_FACTOR, _MASK = 1_000_003, (1 << 52) - 1  # of numbers that a float64 holds


class Arrival(NamedTuple):
    """A batch, as a dataset handed it out.

    Times are by `time.time`: of the request, and of the arrival. `shape` is
    a number that differs for batches of other shapes.
    """

    asked: float
    time: float
    rows: int
    tokens: int
    shape: int


class Arrivals:
    """Notes the batches of datasets, on the host.

    Attributes:
        iterator: The number of the iterator that was created last.
    """

    def __init__(self, element_spec):
        self._first = _first_input(element_spec)
        self._tokens = _token_input(element_spec)
        self.iterator = 0
        ring = np.full((_KEPT, _NUM_COLUMNS), -1.0)
        self._ring = plain_variable(ring, "CPU:0")
        self._iterator = plain_variable(np.float64(0), "CPU:0")

    def begin_iterator(self) -> None:
        """To be called before an iterator over a dataset is created."""
        self.iterator += 1
        self._iterator.assign(self.iterator)

    def noting(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches, which are noted."""
        # `zip` asks for the time first, and then for the batch.
        numbers = tf.data.Dataset.range(tf.int64.max)
        times = numbers.map(_with_time)
        return tf.data.Dataset.zip(times, dataset).map(self._note)

    # To convert this and what it calls took 0.3 seconds.
    @tf.autograph.experimental.do_not_convert
    def _note(self, number_and_time, batch):
        number, asked = number_and_time
        inputs = _inputs(batch)
        tokens = (
            tf.constant(0)
            if self._tokens is None
            else tf.size(inputs[self._tokens])
        )
        facts = (
            *(self._iterator, number, asked, tf.timestamp()),
            *(_rows(inputs[self._first]), tokens, _shape(batch)),
        )
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._ring.handle,
            indices=number % _KEPT,
            updates=tf.stack([tf.cast(fact, tf.float64) for fact in facts]),
        )
        return batch

    def read(self) -> Callable[[int, int], Arrival | None]:
        """Finds the batches so far, by iterator and number in it.

        None stands for one that is not there any more.
        """
        ring = self._ring.numpy()

        def arrival(iterator, number):
            found = ring[number % _KEPT]
            if (found[0], found[1]) != (iterator, number):
                return None
            asked, time, *sizes = found[2:].tolist()
            return Arrival(asked, time, *map(int, sizes))

        return arrival


@tf.autograph.experimental.do_not_convert
def _with_time(number):
    return number, tf.timestamp()


def _inputs(batch):
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.nest.flatten(x)


def _first_input(element_spec):
    """The index of the first input that has rows."""
    for index, spec in enumerate(_inputs(element_spec)):
        if isinstance(spec, _WITH_ROWS) and spec.shape.rank != 0:
            return index
    raise ValueError(
        "`Throughput` counts the rows of inputs as examples. Received: a "
        f"dataset of {element_spec}. Batch it: `dataset.batch(32)`."
    )


def _token_input(element_spec):
    for index, spec in enumerate(_inputs(element_spec)):
        is_tensor = isinstance(spec, tf.TensorSpec)
        if is_tensor and spec.shape.rank == 2 and spec.dtype.is_integer:
            return index
    return None


def _rows(tensor):
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows()
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor)[0]


def _shape(batch):
    """A number for all sizes that may differ from batch to batch."""
    number = tf.constant(0, tf.int64)
    for tensor in tf.nest.flatten(batch, expand_composites=True):
        shape = getattr(tensor, "shape", tf.TensorShape([]))
        if not shape.is_fully_defined():
            sizes = tf.shape(tensor, tf.int64)
            if shape.rank is None:
                number = number * _FACTOR + tf.reduce_prod(sizes)
                continue
            for dim, size in enumerate(shape):
                if size is None:
                    number = number * _FACTOR + sizes[dim]
    return tf.bitwise.bitwise_and(number, tf.constant(_MASK, tf.int64))
