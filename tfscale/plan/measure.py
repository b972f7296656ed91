"""Measures the devices of this machine, which takes seconds."""

import os
import time

import tensorflow as tf

from tfscale.collectives import all_reduce
from tfscale.plan.device import DEVICES
from tfscale.plan.device import Device

_REPEATS = 5
# Width of a matrix that is large enough to reach most of the peak.
_WIDTHS = {"CPU": 1024, "GPU": 8192, "TPU": 8192}
# Lengths of a chain of products.
_FEW, _MANY = 2, 18


def measure_device(num_devices: int, memory: float | None = None) -> Device:
    """Times products, a copy and an all-reduce, on all devices at once.

    All devices work at the same time, as in training: virtual ones share
    cores. If there are fewer than `num_devices`, they stand for the rest.

    Args:
        num_devices: Number of devices to use.
        memory: Bytes of a device, if known.
    """
    kinds = ("GPU", "TPU", "CPU")
    devices = next(filter(None, map(tf.config.list_logical_devices, kinds)))
    names = [device.name for device in devices[:num_devices]]
    kind, number = devices[0].device_type, len(names)
    width = _WIDTHS[kind]

    def product(size, dtype=tf.float32):
        """Seconds of a product in the middle of others."""
        few, many = (
            _seconds(_products(length), names, size, dtype)
            for length in (_FEW, _MANY)
        )
        return (many - few) / (_MANY - _FEW)

    seconds = half_seconds = product(width)
    if kind != "CPU":
        half_seconds = product(width, tf.bfloat16)
    flops, small = 2 * width**3 / seconds, width // 16
    num_bytes = 4 * (2 * width) ** 2
    copy = _seconds(lambda xs: [x + 1.0 for x in xs], names, 2 * width)
    bandwidth = link = 2 * num_bytes / copy
    if number > 1:
        # The bytes that each device of a ring sends.
        sent = 2 * (number - 1) / number * num_bytes
        link = sent / _seconds(all_reduce, names, 2 * width)
    return Device(
        f"{kind} (measured)",
        flops=2 * width**3 / half_seconds,
        float32_flops=flops,
        memory=memory or _memory(kind, number),
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        network_bandwidth=link,
        devices_per_machine=num_devices,
        efficiency=1.0,
        startup=max(product(small) - 2 * small**3 / flops, 0.0),
        link_efficiency=1.0,
    )


def _products(length):
    def compute(xs):
        results = []
        for x in xs:
            with tf.device(x.device):
                y = x
                for _ in range(length):
                    y = tf.matmul(y, x)
                results.append(y)
        return results

    return compute


def _seconds(compute, names, size, dtype=tf.float32):
    """Shortest time of a function of a tensor on each device."""
    inputs = []
    for name in names:
        with tf.device(name):
            # Products of such matrices neither grow nor vanish.
            inputs.append(tf.cast(tf.fill((size, size), 1 / size), dtype))

    @tf.function
    def on_all(*xs):
        tensors = []
        for name, x in zip(names, xs, strict=True):
            with tf.device(name):
                tensors.append(tf.identity(x))
        results = []
        for name, y in zip(names, compute(tensors), strict=True):
            with tf.device(name):
                # An accelerator is done when a number of its result is there.
                results.append(tf.reduce_max(y[:1]))
        return results

    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        for result in on_all(*inputs):
            float(result)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _memory(kind, num_devices):
    """Bytes of a GPU with a preset, or of a device's share of the machine."""
    if kind == "GPU":
        (gpu, *_) = tf.config.list_physical_devices("GPU")
        details = tf.config.experimental.get_device_details(gpu)
        described = str(details.get("device_name"))
        for name, preset in DEVICES.items():
            if name in described:
                return preset.memory
        raise ValueError(
            "The memory of a GPU is known only if there is a preset for it. "
            f"Received: device='measure' and {described!r}. Pass a "
            "`tfscale.plan.Device` with its figures."
        )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / num_devices
