"""Checks of the arguments of `pipeline`."""

import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import Source
from tfscale.integers import check_integer

_BUILDERS = "arrays, csv, dataset, files, image_folder, text, tfds, ..."
_INT64 = 1 << 63


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
        "`source` must be an object that a builder of `tfscale.data` "
        f"returned. Received: a {type(source).__name__}. Use {advice}."
    )


def check_seed(seed):
    """Refuses a seed that is no integer of 64 bits."""
    check_integer("seed", seed, -_INT64, "an integer of 64 bits")


def check_numbers(**numbers):
    """Refuses numbers that are no integers, or out of their range."""
    for name, value in numbers.items():
        tuned = name in ("parallelism", "prefetch")
        default = tf.data.AUTOTUNE if tuned else None
        if value == default and name != "batch_size":
            continue
        least = 0 if name == "prefetch" else 1
        rule = f"{least} or more" + ", or `tf.data.AUTOTUNE`" * tuned
        check_integer(name, value, least, rule)


def shuffle_window(shuffle):
    """The number of records that are mixed at a time; None if not given."""
    if shuffle is None or isinstance(shuffle, (bool, np.bool_)):
        return None
    rule = "True, False or the number of records mixed at a time, 1 or more"
    check_integer("shuffle", shuffle, 1, rule)
    return shuffle
