"""Times a function of tensors on devices that work at the same time."""

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

# At least so often, and so many seconds.
REPEATS, SECONDS = 5, 0.4
# Width of a matrix that is large enough to reach most of the peak.
WIDTHS = {"CPU": 1024, "GPU": 8192, "TPU": 8192}
# Lengths of a chain of operations.
FEW, MANY = 2, 18


def seconds_of_product(
    names: Sequence[str], dtype: tf.DType = tf.float32
) -> float:
    """Seconds of a product of large square matrices, on each of some devices.

    They are as wide as `WIDTHS` says for the kind of device.
    """
    kind = tf.DeviceSpec.from_string(names[0]).device_type
    return seconds_of_one(_products, names, WIDTHS[kind], dtype)


def seconds_of_one(
    chain: Callable,
    names: Sequence[str],
    size: int,
    dtype: tf.DType = tf.float32,
) -> float:
    """Seconds of one operation in the middle of a chain.

    `chain` takes its length and a square tensor of each device.
    """
    few, many = (
        seconds(functools.partial(chain, length), names, (size,) * 2, dtype)
        for length in (FEW, MANY)
    )
    if many <= few:  # Other programs ran.
        return many / MANY
    return (many - few) / (MANY - FEW)


def on_each(compute: Callable, xs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of a function of a tensor, each on the tensor's device."""
    results = []
    for x in xs:
        with tf.device(x.device):
            results.append(compute(x))
    return results


def seconds(
    compute: Callable,
    names: Sequence[str],
    shape: Sequence[int],
    dtype: tf.DType = tf.float32,
) -> float:
    """Shortest time of a function of a tensor on each device."""
    inputs = []
    for name in names:
        with tf.device(name):
            # Products of such matrices neither grow nor vanish.
            inputs.append(tf.cast(tf.fill(shape, 1 / shape[1]), dtype))

    @tf.function(autograph=False)
    def on_all(*xs):
        tensors = []
        for name, x in zip(names, xs, strict=True):
            with tf.device(name):
                tensors.append(tf.identity(x))
        results = []
        for name, y in zip(names, compute(tensors), strict=True):
            with tf.device(name):
                # An accelerator is done when a number of its result is there.
                results.append(tf.reduce_max(y[:1] if y.shape.rank else y))
        return results

    on_all(*inputs)
    times = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        begin = time.perf_counter()
        for result in on_all(*inputs):
            float(result)
        times.append(time.perf_counter() - begin)
    return min(times)


def _products(length, xs):
    def compute(x):
        y = x
        for _ in range(length):
            y = tf.matmul(y, x)
        return y

    return on_each(compute, xs)
