"""Batches that Python makes: none is lost, and none is overwritten.

A tensor that a function of Python returns to tf.data may lie in the memory of
the user's array, and TensorFlow computes in the memory of a part of a batch
that nobody else has: his targets were then differences of targets and
predictions. So such batches are copied, before replicas get their parts.

Under a strategy Keras looks at a batch before it trains, with an iterator that
it throws away, and TensorFlow reads up to four batches ahead for that. Other
data begins anew; what was taken out of a generator is gone, and so is what the
workers of a `PyDataset` had made. Keras has kept the first two batches of a
generator to know their shapes, and it is shown these in its place; of a
`PyDataset`, batches that are made for it.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place

_NUMBERS = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8),
    *(tf.complex64, tf.complex128),
)


def unread(
    distributed: Any, distribute: Callable[[tf.data.Dataset], Any]
) -> Any:
    """A distributed dataset that Keras may look at and that is as it was.

    Args:
        distributed: A `tf.distribute.DistributedDataset`; unless it is of a
            generator or a `PyDataset` given to `fit` or `evaluate`, nothing is
            done.
        distribute: Makes such datasets.
    """
    first_batches = _internals.first_batches_from_python()
    if first_batches is not None:
        in_place.put(
            distributed, _Unread, first_batches=distribute(first_batches)
        )
    return distributed


# No `in_place.Mixin`, see placed_inputs.py.
class _Unread(Iterable):
    def __iter__(self):
        if _internals.model_that_looks_at_data() is not None:
            return iter(self.first_batches)
        return super().__iter__()


def copied(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose records are in no memory of arrays of Python.

    Args:
        dataset: Any; unless functions of Python make it, it is returned.
    """
    if not _internals.calls_python(dataset):
        return dataset

    def copy(*records):
        tensors = tf.nest.flatten(records, expand_composites=True)
        return tf.nest.pack_sequence_as(
            dataset.element_spec,
            [
                tf.raw_ops.DeepCopy(x=x) if x.dtype in _NUMBERS else x
                for x in tensors
            ],
            expand_composites=True,
        )

    return dataset.map(copy)
