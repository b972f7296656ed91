"""The memory for a pipeline: the machine's or the cgroup's."""

import os
import pathlib

import keras
import numpy as np

# A container's limit and use, cgroup version 2 and version 1.
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_SHARE = 0.5  # the model and other pipelines need the rest


def budget(*, cgroup="/sys/fs/cgroup", available=None):
    """Bytes that a cache or a shuffle buffer may take.

    Half of the free memory of the machine, measured if `available` is None, or
    of the limit of the control groups if that leaves less.
    """
    free = [_machine_available() if available is None else available]
    for limit_name, use_name in _CGROUPS:
        limit = _read(pathlib.Path(cgroup) / limit_name)
        use = _read(pathlib.Path(cgroup) / use_name)
        if limit is not None and use is not None:
            free.append(max(limit - use, 0))
    return int(min(free) * _SHARE)


def _machine_available():
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all memory of the machine
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # none there, or "max": no limit
        return None


def size_of(record):
    """Bytes of a structure of eager tensors, strings included."""
    return sum(_tensor_bytes(t) for t in keras.tree.flatten(record))


def _tensor_bytes(tensor):
    if tensor.dtype == "string":
        return sum(len(value) for value in np.ravel(tensor.numpy()))
    return tensor.dtype.size * int(tensor.shape.num_elements())
