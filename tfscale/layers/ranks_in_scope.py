"""Builds layers that shard their own variables in a scope."""

import contextlib

import tensorflow as tf

from tfscale._internals import attributes


def num_ranks() -> int:
    """The number of devices over which new variables are sharded."""
    extended = tf.distribute.get_strategy().extended
    return getattr(extended, "num_model_ranks", 1)


@contextlib.contextmanager
def building(layer, what: str, size: int):
    """Within it, variables are created at once, sharded along `size` entries.

    In a model that `fit` builds they would be created after all layers are
    built, when their layer is not known any more.

    Raises:
        ValueError: If the model axis does not divide `size`, that of `what`.
    """
    ranks = num_ranks()
    if ranks == 1:
        yield
        return
    if size % ranks:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"The model axis must divide {what} of a `{type(layer).__name__}`. "
            f"Received: {size} in {layer.name!r}, and a model axis of size "
            f"{ranks}. Use {size - size % ranks or ranks} or "
            f"{size + -size % ranks}, or a model axis of "
            f"{', '.join(map(str, divisors))}."
        )
    with attributes.variables_created_eagerly():
        yield
