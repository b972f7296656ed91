"""Checks of the arguments of `pipeline`."""

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfscale.data.sources.source import BlockSource
from tfscale.data.sources.source import IndexedSource
from tfscale.data.sources.source import StreamSource

_BUILDERS = "arrays, csv, dataset, files, image_folder, text, tfds, ..."
_INT64 = 1 << 63
_REPLACED = {
    "deterministic": "`options.deterministic`",
    "num_threads": "`options.threading.private_threadpool_size`",
    "interleaved_reads": "nothing: 16 files are read at a time",
}


def check_source(source):
    """Refuses an object that no builder returned."""
    if isinstance(source, BlockSource | IndexedSource | StreamSource):
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


def check_numbers(*, seed, num_threads, **positive):
    """Refuses numbers that are no integers, or out of their range."""
    _check_integer("seed", seed, -_INT64, "an integer of 64 bits")
    if num_threads is not None:
        _check_integer("num_threads", num_threads, 0, "0 or more, or None")
    for name, value in positive.items():
        tuned = name in ("parallelism", "prefetch")
        if value is None and name in ("ram_budget", "shuffle_window"):
            continue
        if tuned and value == tf.data.AUTOTUNE:
            continue
        least = 0 if name in ("prefetch", "ram_budget") else 1
        rule = f"{least} or more" + ", or `tf.data.AUTOTUNE`" * tuned
        _check_integer(name, value, least, rule)


def with_replaced(
    options: tf.data.Options | None, replaced: Mapping[str, Any]
) -> tf.data.Options:
    """Options, with arguments of the last release that they have replaced.

    Raises:
        TypeError: If there never was such an argument.
    """
    options = tf.data.Options().merge(options or tf.data.Options())
    for name, value in replaced.items():
        if name not in _REPLACED:
            raise TypeError(f"`pipeline` has no argument {name!r}.")
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
    return options


def _check_integer(name, value, least, rule):
    message = f"`{name}` must be {rule}. Received: {name}={value!r}."
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(message)
    if not least <= value < _INT64:
        raise ValueError(message)
