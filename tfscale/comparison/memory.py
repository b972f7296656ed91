"""Refuses variables that do not fit one device, before they are created."""

import contextlib
import math
from collections.abc import Iterator

import tensorflow as tf

from tfscale.formatting import readable_bytes
from tfscale.free_memory import free_bytes


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Within it, variables larger than the free memory of a host are refused.

    Accelerators refuse by themselves.
    """
    limit, used = free_bytes(), 0

    def create(next_creator, **options):
        nonlocal used
        value = options["initial_value"]
        if callable(value):
            value = options["initial_value"] = value()
        value = tf.convert_to_tensor(value, options.get("dtype"))
        used += math.prod(value.shape) * value.dtype.size
        if limit is not None and used > limit:
            raise _error(f"variables of {readable_bytes(used)} or more")
        return next_creator(**options)

    try:
        with tf.variable_creator_scope(create):
            yield
    except tf.errors.ResourceExhaustedError as error:
        raise _error(str(error)) from error


def _error(received):
    free = free_bytes()
    return ValueError(
        "The model and its optimizer's slots must fit one device. Received: "
        f"{received}, where {readable_bytes(free or 0)} of the host are free. "
        "Compare the same model at a smaller width or depth."
    )
