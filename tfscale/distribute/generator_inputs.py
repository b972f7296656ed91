"""Batches of a Python generator, of which none is lost.

Under a strategy Keras looks at a batch before it trains, with an iterator that
it throws away, and TensorFlow reads up to four batches ahead for that. Other
data begins anew; what was taken out of a generator is gone. Keras has kept the
first two batches to know their shapes, and it is shown these in its place.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfscale import _internals
from tfscale import in_place


def unread(
    distributed: Any, distribute: Callable[[tf.data.Dataset], Any]
) -> Any:
    """A distributed dataset that Keras may look at and that is as it was.

    Args:
        distributed: A `tf.distribute.DistributedDataset`; unless it is of a
            generator that was given to `fit` or `evaluate`, nothing is done.
        distribute: Makes such datasets.
    """
    first_batches = _internals.first_batches_of_generator()
    if first_batches is not None:
        in_place.put(
            distributed, _Unread, first_batches=distribute(first_batches)
        )
    return distributed


# No `in_place.Mixin`, see placed_inputs.py.
class _Unread(Iterable):
    def __iter__(self):
        if _internals.keras_looks_at_data():
            return iter(self.first_batches)
        return super().__iter__()
