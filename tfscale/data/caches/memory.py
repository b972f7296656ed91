"""The memory for a pipeline: the machine's or the cgroup's."""

import os

import numpy as np
import tensorflow as tf

from tfscale.free_memory import free_bytes

_SHARE = 0.5  # the model and other pipelines need the rest


def budget():
    """Bytes that a cache or a shuffle window may take: half of those free."""
    free = free_bytes()
    if free is None:  # all memory of the machine
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(free * _SHARE)


def size_of(record):
    """Bytes of an element of a dataset, strings included."""
    flat = tf.nest.flatten(record, expand_composites=True)
    return sum(_tensor_bytes(t) for t in flat if t is not None)


def _tensor_bytes(tensor):
    if tensor.dtype == tf.string:
        return sum(len(value) for value in np.ravel(tensor.numpy()))
    return tensor.dtype.size * int(tensor.shape.num_elements())
