"""What layers that shard their own variables ask of the strategy in scope."""

import contextlib

import tensorflow as tf

from tfscale import _internals


def num_ranks() -> int:
    """Over how many devices variables are sharded that are made now."""
    extended = tf.distribute.get_strategy().extended
    return getattr(extended, "num_model_ranks", 1)


def check_divides(layer, what: str, size: int) -> None:
    """Raises a `ValueError` if the model axis does not divide a size.

    Args:
        layer: The layer, for its class and name.
        what: What it is the size of.
        size: The size in full.
    """
    ranks = num_ranks()
    if size % ranks == 0:
        return
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    raise ValueError(
        f"The model axis must divide {what} of a `{type(layer).__name__}`. "
        f"Received: {size} in {layer.name!r}, and a model axis of size "
        f"{ranks}. Use {size - size % ranks or ranks} or "
        f"{size + -size % ranks}, or a model axis of "
        f"{', '.join(map(str, divisors))}."
    )


@contextlib.contextmanager
def created_at_once():
    """Within it, variables are made even where Keras would wait.

    A model that `fit` builds has its variables made after all layers are
    built, when nothing says any more to which layer they belong.
    """
    if num_ranks() == 1:
        yield
        return
    with _internals.variables_created_eagerly():
        yield
