"""Checks of the arguments of `pipeline`."""

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import Source

_BUILDERS = "arrays, csv, dataset, files, image_folder, text, tfds, ..."
_INT64 = 1 << 63
_REPLACED = {
    "deterministic": "`options.deterministic`",
    "num_threads": "`options.threading.private_threadpool_size`",
    "interleaved_reads": "nothing: 16 files are read at a time",
    "shuffle_window": "the number for `shuffle`",
    "ram_budget": "`options.autotune.ram_budget`",
    "service_lanes": "nothing: 8 workers of a service work at a time",
}


def check_source(source):
    """Refuses an object that no builder returned."""
    if isinstance(source, Source):
        return
    advice = f"what a builder of `tfscale.data` returns ({_BUILDERS})"
    if isinstance(source, tf.data.Dataset):
        advice = "`tfscale.data.dataset(...)` around it"
    elif hasattr(source, "__array__"):
        advice = "`tfscale.data.arrays(...)` around it"
    raise TypeError(
        "`source` must be what a builder of `tfscale.data` returned. "
        f"Received: a {type(source).__name__}. Use {advice}."
    )


def check_seed(seed):
    """Refuses a seed that is no integer of 64 bits."""
    _check_integer("seed", seed, -_INT64, "an integer of 64 bits")


def check_numbers(**numbers):
    """Refuses numbers that are no integers, or out of their range."""
    for name, value in numbers.items():
        tuned = name in ("parallelism", "prefetch")
        default = tf.data.AUTOTUNE if tuned else None
        if value == default and name != "batch_size":
            continue
        least = 0 if name in ("num_threads", "prefetch", "ram_budget") else 1
        rule = f"{least} or more" + ", or `tf.data.AUTOTUNE`" * tuned
        _check_integer(name, value, least, rule)


def shuffle_window(shuffle):
    """The number of records that are mixed at a time; None if not given."""
    if shuffle is None or isinstance(shuffle, (bool, np.bool_)):
        return None
    rule = "True, False or the number of records mixed at a time, 1 or more"
    _check_integer("shuffle", shuffle, 1, rule)
    return shuffle


def with_replaced(
    options: tf.data.Options | None,
    shuffle: bool | int,
    replaced: Mapping[str, Any],
) -> tuple[tf.data.Options, bool | int]:
    """`options` and `shuffle` with replaced arguments of the last release."""
    options = tf.data.Options().merge(options or tf.data.Options())
    for name, value in replaced.items():
        if name not in _REPLACED:
            raise TypeError(f"`pipeline` has no argument {name!r}.")
        if name != "deterministic":
            check_numbers(**{name: value})
        warnings.warn(
            f"`{name}` of `tfscale.data.pipeline` goes in the next release. "
            f"Use {_REPLACED[name]}.",
            DeprecationWarning,
            stacklevel=3,
        )
        if name == "deterministic":
            options.deterministic = value
        elif name == "num_threads" and value is not None:
            options.threading.private_threadpool_size = value
        elif name == "ram_budget" and value is not None:
            options.autotune.ram_budget = value
        elif name == "shuffle_window" and value is not None and shuffle:
            shuffle = value
    return options, shuffle


def _check_integer(name, value, least, rule):
    message = f"`{name}` must be {rule}. Received: {name}={value!r}."
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(message)
    if not least <= value < _INT64:
        raise ValueError(message)
