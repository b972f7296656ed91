"""What a step takes of the memory of its devices, and what there is.

Of a GPU TensorFlow counts what is allocated, and was told what there is. On a
host it is the process that takes memory, with all that its allocator keeps in
pieces: its peak is what is looked at, against what is free and against limits
of its control group and of its address space.
"""

import resource
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfscale import _internals

# For what comes later, and what others on the machine take.
_USABLE = 0.9


class Memory:
    """The memory of the devices that a model runs on.

    Args:
        devices: Their names. All CPUs of a process have one memory.
        limit: Bytes that each of them may take, as TensorFlow counts them; by
            default what there is.

    Raises:
        ValueError: If it is not known what there is.
    """

    def __init__(self, devices: Iterable[str], limit: float | None = None):
        self._gauges = [
            gauge
            for name in sorted(set(map(_short, devices)))
            for gauge in _gauges(name, limit)
        ]

    def reset(self) -> None:
        """Begins to look for the peak."""
        for gauge in self._gauges:
            if not gauge.is_of_process:
                tf.config.experimental.reset_memory_stats(gauge.device)

    def use(self) -> float:
        """The peak since then, of what there is of it; 1.0 is all."""
        return max(gauge.peak() / gauge.limit for gauge in self._gauges)

    def use_with(
        self, there: Sequence[tf.Variable], more: Sequence[tf.Variable]
    ) -> float:
        """What is taken now, and would be with more; 1.0 is all.

        Args:
            there: Variables; TensorFlow copies some when they are written.
            more: What there would be as much of.
        """
        found = 0.0
        for gauge in self._gauges:
            now = gauge.peak()
            if not gauge.is_of_process:
                now = max(now, _bytes_on(gauge.device, there))
            taken = now + _bytes_on(gauge.device, more)
            found = max(found, taken / gauge.limit)
        return found


class _Gauge(NamedTuple):
    device: str
    is_of_process: bool
    peak: Callable[[], float]
    limit: float


def _gauges(name, limit):
    if name == "CPU:0" and limit is None:
        yield from _gauges_of_process(name)
        return
    if limit is None:
        limit = next(
            device.memory_limit
            for device in _internals.list_local_devices()
            if device.name.endswith(name)
        )

    def peak():
        return tf.config.experimental.get_memory_info(name)["peak"]

    yield _Gauge(name, False, peak, _USABLE * limit)


def _gauges_of_process(name):
    resident, size = _of_process("VmRSS"), _of_process("VmSize")
    free = _kib("/proc/meminfo", "MemAvailable")
    group = _number("/sys/fs/cgroup/memory.max")
    if group is not None:
        taken = _number("/sys/fs/cgroup/memory.current") or 0
        free = max(0, min(free, group - taken))
    yield _Gauge(
        name,
        True,
        lambda: _of_process("VmHWM"),
        resident + _USABLE * free,
    )
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        yield _Gauge(
            name,
            True,
            lambda: _of_process("VmPeak"),
            size + _USABLE * (allowed - size),
        )


def _of_process(key):
    return _kib("/proc/self/status", key)


def _kib(path, key):
    try:
        with open(path) as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines[key].split()[0]) << 10
    except (OSError, KeyError) as error:
        raise ValueError(
            "num_microbatches='auto' must be told how much memory there is "
            f"where the system does not say it. Received: no {key} in {path}. "
            "Give `memory_limit`, in bytes, or a number of microbatches."
        ) from error


def _number(path):
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # no control group, or "max"
        return None


def _short(name):
    spec = tf.DeviceSpec.from_string(name)
    if spec.device_type == "CPU":
        return "CPU:0"
    return f"{spec.device_type}:{spec.device_index}"


def _bytes_on(device, variables):
    return sum(
        each.shape.num_elements() * each.dtype.size
        for each in variables
        if _short(each.device) == device
    )
