"""Full names of devices, as TensorFlow writes them."""

import functools
from collections.abc import Sequence

import tensorflow as tf


def full_name(device: str, default: str = "") -> str:
    """The name of a device with its job, replica, task, kind and number.

    Parts that are missing come from `default`, or the first CPU of this
    process.

    >>> full_name("/device:CPU:0", "/job:worker/replica:0/task:1/device:GPU:2")
    '/job:worker/replica:0/task:1/device:CPU:0'
    """
    spec = tf.DeviceSpec("localhost", 0, 0, "CPU", 0)
    here = tf.config.list_logical_devices("CPU")[0].name
    for name in (here, default, device):
        spec = spec.make_merged_spec(tf.DeviceSpec.from_string(name))
    return spec.to_string()


def host_of(device: str) -> str:
    """The host of a device (a full name): the first CPU of its task."""
    return full_name("/device:CPU:0", device)


def are_accelerators(device_rows: Sequence[Sequence[str]]) -> bool:
    """Whether any device is no CPU, perhaps one of another machine."""
    return any("CPU" not in name for row in device_rows for name in row)


@functools.lru_cache(maxsize=256)
def machines(devices: tuple[str, ...]) -> tuple[int, ...]:
    """The machine of each device, by the task in its name."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    tasks = [(spec.job, spec.replica, spec.task) for spec in specs]
    numbers = {task: i for i, task in enumerate(dict.fromkeys(tasks))}
    return tuple(numbers[task] for task in tasks)
