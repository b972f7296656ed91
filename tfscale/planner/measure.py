"""Measures the devices of this machine, which takes seconds."""

import functools
import os
import re

import tensorflow as tf

from tfscale.collectives import all_reduce
from tfscale.mesh import timing
from tfscale.planner.device import DEVICES
from tfscale.planner.device import Device

# Bytes of a tensor that is too large for caches. A device of a split GPU, which
# has a few of them, may have no more than 2 GiB.
_COPIED = {"CPU": 1 << 24, "GPU": 1 << 28, "TPU": 1 << 28}
# Blocks of a transformer that is trained, tokens of its sequences and batches.
_BLOCKS, _LENGTH, _TOKENS = 3, 32, (32, 512)
# Attention's count as one of the forward and two of the backward.
_PRODUCTS = 9 * _BLOCKS


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
    few, many = _TOKENS
    of_few, of_many = (
        timing.seconds(_train, names, (tokens, width // 4))
        for tokens in _TOKENS
    )
    # The time of a batch without tokens.
    startup = (of_few * many - of_many * few) / (many - few)
    alone = of_many / timing.seconds(_train, names[:1], (many, width // 4))
    num_bytes = _COPIED[kind]
    shape = (num_bytes // 4096, 1024)
    copy = timing.seconds(lambda xs: [x + 1.0 for x in xs], names, shape)
    bandwidth = link = 2 * num_bytes / copy
    states = [_adam_states(name, shape) for name in names]
    update = timing.seconds(functools.partial(_update, states), names, shape)
    latency = 0.0
    if number > 1:
        # The bytes that each device of a ring sends.
        sent = 2 * (number - 1) / number * num_bytes
        link = sent / timing.seconds(all_reduce, names, shape)
        latency = timing.seconds_of_one(_sums, names, 1)
    return Device(
        f"{kind} (measured)",
        flops=2 * width**3 / half_seconds,
        float32_flops=2 * width**3 / seconds,
        memory=memory or _memory(kind, number),
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        network_bandwidth=link,
        devices_per_machine=num_devices,
        efficiency=1.0,
        startup=max(startup, 0.0) / _PRODUCTS,
        link_efficiency=1.0,
        latency=latency,
        update_bytes=update * bandwidth / (num_bytes // 4),
        speed_alone=max(alone, 1.0),
    )


def _sums(length, xs):
    for _ in range(length):
        xs = timing.on_each(lambda x: x / 2, all_reduce(xs))
    return xs


def _adam_states(name, shape):
    """A weight and its slots."""
    with tf.device(name):
        return [tf.Variable(tf.zeros(shape)) for _ in range(3)]


def _update(states, gradients):
    """One of Adam."""
    results = []
    for g, (w, m, v) in zip(gradients, states, strict=True):
        with tf.device(g.device):
            m.assign_add((g - m) * 0.1)
            v.assign_add((tf.square(g) - v) * 0.001)
            results.append(w.assign_sub(m * g[0, 0] / (tf.sqrt(v) + 1e-7)))
    return results


def _train(xs):
    """Forward and backward of some blocks of a transformer."""

    def compute(x):
        width = x.shape[1]
        # Not known before it runs, or it would be computed only once.
        scale = x[0, 0]
        sizes = 4 * [(width, width)]
        sizes += [(width, 4 * width), (4 * width, width)]
        kernels = [
            [tf.fill(size, scale / width) for size in sizes]
            for _ in range(_BLOCKS)
        ]
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            y = x
            for *projections, combine, widen, narrow in kernels:
                z = _normalized(y)
                y += _attention(*(z @ each for each in projections)) @ combine
                y += tf.nn.gelu(_normalized(y) @ widen) @ narrow
        gradients = tf.nest.flatten(tape.gradient(y, kernels))
        return tf.reduce_max([tf.reduce_max(g[:1]) for g in gradients])

    return timing.on_each(compute, xs)


def _attention(*projected):
    """Of sequences one after the other, with four heads."""
    queries, keys, values = (
        tf.transpose(
            tf.reshape(x, (-1, _LENGTH, 4, x.shape[1] // 4)), (0, 2, 1, 3)
        )
        for x in projected
    )
    scores = tf.nn.softmax(tf.matmul(queries, keys, transpose_b=True))
    mixed = tf.transpose(tf.matmul(scores, values), (0, 2, 1, 3))
    return tf.reshape(mixed, projected[0].shape)


def _normalized(x):
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


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
