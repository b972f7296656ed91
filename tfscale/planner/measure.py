"""Measures the devices of this machine, which takes seconds."""

import functools
import math
import os
import re

import tensorflow as tf

from tfscale.collectives import all_reduce
from tfscale.mesh import timing
from tfscale.planner import blocks
from tfscale.planner.device import DEVICES
from tfscale.planner.device import Device

# Bytes of a tensor that is too large for caches. A device of a split GPU, which
# has a few of them, may have no more than 2 GiB.
_COPIED = {"CPU": 1 << 24, "GPU": 1 << 28, "TPU": 1 << 28}
# Weights of an update: a large one, or as many elements in smaller ones.
_WEIGHTS = (1, 4)
# Examples whose products take less time than their weight goes through memory.
_ROWS = 2


def measure_device(num_devices: int, memory: float | None = None) -> Device:
    """Times products, training, a copy and sums, on all devices at once.

    All devices work at the same time, as in training: virtual ones share
    cores. If there are fewer than `num_devices`, they stand for the rest.
    `memory` are the bytes of a device, if known.
    """
    kinds = ("GPU", "TPU", "CPU")
    devices = next(filter(None, map(tf.config.list_logical_devices, kinds)))
    names = [device.name for device in devices[:num_devices]]
    kind, number = devices[0].device_type, len(names)
    width = timing.WIDTHS[kind]

    seconds = half_seconds = timing.seconds_of_product(names)
    if kind != "CPU":
        half_seconds = timing.seconds_of_product(names, tf.bfloat16)
    model = blocks.make_blocks(width // 4)
    train = blocks.training(model, names)
    alone = blocks.training(model, names[:1])
    example = model.example_shape
    of_few, of_many = (
        timing.seconds(train, names, (rows, *example))
        for rows in (blocks.FEW, blocks.MANY)
    )
    of_one = timing.seconds(alone, names[:1], (blocks.MANY, *example))
    num_bytes = _COPIED[kind]
    shape = (num_bytes // 4096, 1024)
    copy = timing.seconds(lambda xs: [x + 1.0 for x in xs], names, shape)
    bandwidth = link = 2 * num_bytes / copy
    update, smaller = (
        _time_of_update(names, shape, count) for count in _WEIGHTS
    )
    drawing = timing.seconds(_random, names, shape)
    flops = 2 * width**3 / seconds
    # Products of a forward, and two of a backward, and the weight's traffic.
    products = _time_of_products(names, shape)
    moving = products - 6 * _ROWS * math.prod(shape) / flops
    weight_passes = max(moving * bandwidth / num_bytes, 0.0)
    of_blocks = of_few, of_many
    fitted = blocks.fit(
        model.layers, of_blocks, flops, bandwidth, weight_passes
    )
    latency = 0.0
    if number > 1:
        # The bytes that each device of a ring sends.
        sent = 2 * (number - 1) / number * num_bytes
        link = sent / timing.seconds(all_reduce, names, shape)
        latency = timing.seconds_of_one(_sums, names, 1)
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
        startup=fitted.startup,
        link_efficiency=1.0,
        latency=latency,
        passes=fitted.passes,
        weight_passes=weight_passes,
        random_bytes=drawing * bandwidth / (num_bytes // 4),
        update_bytes=update * bandwidth / (num_bytes // 4),
        small_update_bytes=smaller * bandwidth / (num_bytes // 4),
        speed_alone=max(of_many / of_one, 1.0),
    )


def _sums(length, xs):
    for _ in range(length):
        xs = timing.on_each(lambda x: x / 2, all_reduce(xs))
    return xs


def _random(xs):
    """As many random numbers as elements."""
    # A seed that is not known before, or they would be drawn only once.
    return timing.on_each(
        lambda x: tf.random.stateless_uniform(
            x.shape, tf.cast(x[0, :2] * 1e6, "int32")
        ),
        xs,
    )


def _time_of_products(names, shape):
    """Seconds of a large weight's forward and backward, of a few examples."""
    weights = []
    for name in names:
        with tf.device(name):
            weights.append(tf.Variable(tf.fill(shape, 1 / shape[0])))

    def train(xs):
        results = []
        for x, weight in zip(xs, weights, strict=True):
            with tf.device(x.device), tf.GradientTape() as tape:
                value = weight.read_value()
                tape.watch([x, value])
                y = tf.matmul(x, value)
            with tf.device(x.device):
                of_x, of_weight = tape.gradient(y, [x, value])
                results.append(
                    tf.reduce_max(of_x) + tf.reduce_max(of_weight[:1])
                )
        return results

    return timing.seconds(train, names, (_ROWS, shape[0]))


def _time_of_update(names, shape, num_weights):
    """Seconds of one of Adam, of so many weights that have a shape together."""
    shape = (shape[0] // num_weights, *shape[1:])
    states = []
    for name in names:
        with tf.device(name):
            states.append(
                [
                    [tf.Variable(tf.zeros(shape)) for _ in range(3)]
                    for _ in range(num_weights)
                ]
            )
    return timing.seconds(functools.partial(_update, states), names, shape)


def _update(states, gradients):
    """Updates the weights of each device by its gradient."""
    results = []
    for g, of_device in zip(gradients, states, strict=True):
        with tf.device(g.device):
            for w, m, v in of_device:
                m.assign_add((g - m) * 0.1)
                v.assign_add((tf.square(g) - v) * 0.001)
                result = w.assign_sub(m * g[0, 0] / (tf.sqrt(v) + 1e-7))
            results.append(result)
    return results


def preset_of_gpu() -> tuple[Device | None, str]:
    """The preset of this machine's first GPU, if there is one, and its name."""
    (gpu, *_) = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpu)
    described = str(details.get("device_name"))
    found = (DEVICES[name] for name in DEVICES if name in described)
    return next(found, None), described


def _memory(kind, num_devices):
    """Bytes of a GPU with a preset, or of a device's share of the machine."""
    if kind == "GPU":
        preset, described = preset_of_gpu()
        if preset is not None:
            # An A100 also comes with 40 GB, and in MIG devices of 5 GB.
            sizes = re.findall(r"(\d+) ?GB\b", described, re.IGNORECASE)
            return min([preset.memory, *(1e9 * int(n) for n in sizes)])
        raise ValueError(
            "The memory of a GPU is known only if there is a preset for it. "
            f"Received: device='measure' and {described!r}. Pass a "
            "`tfscale.planner.Device` with its figures."
        )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / num_devices
