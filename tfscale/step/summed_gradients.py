"""Knows the results of `tfscale.sum_gradients` in a graph.

They are those of one device. What a `train_step` makes of them is so too, and
is applied as it is; gradients of a tape are summed first.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.step import batch_shard

_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")
# In the names of sums.
_SUM = "tfscale_summed_gradient"


def as_sum(gradient: tf.Tensor) -> tf.Tensor:
    """The same gradient, marked as whole."""
    return tf.identity(gradient, name=_SUM)


def are_sums(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> list[bool]:
    """Whether each gradient is made of results of `as_sum`.

    Raises a ValueError if sums were added to gradients that were not summed.
    """
    batch_shard.warn_of_undivided()
    found = []
    for gradient, variable in zip(gradients, variables):
        is_sum, is_of_tape = _origin_of(gradient)
        if is_sum and is_of_tape:
            raise ValueError(
                "All that a gradient is made of must be summed. Received: for "
                f"{variable.path!r} one that is made of what "
                "`tfscale.sum_gradients` has returned and of what it was not "
                "given. Give it all gradients of the tape first."
            )
        found.append(is_sum)
    return found


def _origin_of(gradient):
    """Whether a gradient is made of sums, and of results of a tape."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    if gradient is None or not tf.is_symbolic_tensor(gradient):
        return False, False
    is_sum = is_of_tape = False
    seen, stack = {gradient.op}, [gradient.op]
    while stack:
        op = stack.pop()
        if _SUM in op.name:
            is_sum = True
        elif _is_of_tape(op):
            is_of_tape = True
        else:
            # Shapes and indices are not followed.
            inputs = {x.op for x in op.inputs if x.dtype.is_floating} - seen
            seen |= inputs
            stack += inputs
    return is_sum, is_of_tape


def _is_of_tape(op):
    """Whether a tape created it, by its name or by the function it calls."""
    if _BACKWARD.search(op.name):
        return True
    is_call = op.type in ("PartitionedCall", "StatefulPartitionedCall")
    return is_call and "__backward_" in op.get_attr("f").name
