"""Runs code of users on small sample tensors, without side effects.

The results show what a name does not: whether the code adds to variables
(metric_trial.py), or is a mean over rows (loss_trial.py).
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.graphs.noting_scope import outside_scopes

# Sizes of unknown dims, by index.
_SIZES = (4, 3, 2, 2, 2, 2)


def complaint(wrong: str, passes: Callable[..., bool], *args: Any) -> str:
    """What a warning says of a trial, before what may be `wrong`; or nothing.

    `passes` is called with `args`, outside of all scopes.
    """
    try:
        if outside_scopes(passes, *args):
            return ""
        return f"which on a trial {wrong}: it"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return f"which could not be tried ({why}). If it"


def traced(
    function: Callable,
    args: Any,
    kwargs: Any,
    variables: Sequence[keras.Variable] = (),
    rows: int | None = None,
) -> tuple[Callable, list[tf.Tensor]]:
    """A function without side effects, and sample tensors for it.

    It takes values of `variables` and then tensors like those of `args` and
    `kwargs`; it returns its result and then the variables' new values.
    """
    structure = (args, kwargs)
    flat = keras.tree.flatten(structure)
    tensors = [x for x in flat if tf.is_tensor(x)]
    # A size that one tensor leaves open may be that of another: of a text.
    sizes = dict(enumerate(_SIZES))
    for x in reversed(tensors):
        sizes |= {dim: n for dim, n in enumerate(x.shape) if n is not None}
    inputs = [_sample(x, i, rows, sizes) for i, x in enumerate(tensors)]
    feeds, fetches = [], []

    def build():
        states = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables]
        feeds.extend(states)
        feeds.extend(tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs)
        rest = iter(feeds[len(states) :])
        given = [next(rest) if tf.is_tensor(x) else x for x in flat]
        args, kwargs = keras.tree.pack_sequence_as(structure, given)
        with keras.StatelessScope(list(zip(variables, states))) as scope:
            result = function(*args, **kwargs)
        result = tf.zeros(()) if result is None else result
        fetches.append(tf.identity(result))
        for variable in variables:
            value = scope.get_current_value(variable)
            fetches.append(tf.identity(value))

    wrapped = tf.compat.v1.wrap_function(build, [])
    return wrapped.prune(feeds, fetches), inputs


def _sample(tensor, seed, rows, sizes):
    """Values like a tensor's: classes are 0 and 1, scores between them."""
    shape = [
        sizes[dim] if size is None else size
        for dim, size in enumerate(tensor.shape)
    ]
    if rows is not None:
        shape[:1] = [rows] * len(shape[:1])
    count = int(np.prod(shape))
    with tf.device("CPU:0"):
        if tensor.dtype == tf.string:
            return tf.fill(shape, "a")
        if tensor.dtype.is_floating or tensor.dtype.is_complex:
            values = np.random.default_rng(seed).uniform(0.1, 0.9, count)
        else:
            values = np.arange(count) % 2
        return tf.cast(tf.reshape(tf.constant(values), shape), tensor.dtype)
