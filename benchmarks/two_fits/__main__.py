"""Two jobs that wait for input, on the same devices, against one alone.

    python -m benchmarks.two_fits

Each is a `fit` of a mesh with data=2, in a thread of one process, whose batches
take `--milliseconds` to arrive. All are traced before a time is taken.
"""

import statistics
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfscale

PAIRS = flags.DEFINE_integer("pairs", 5, "How often each is measured.")
STEPS = flags.DEFINE_integer("steps", 100, "Steps of a training.")
MILLISECONDS = flags.DEFINE_float("milliseconds", 20.0, "Of a batch to arrive.")


def job():
    """Returns a function that trains for an epoch."""
    with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    batch = np.ones((16, 64), "float32"), np.ones((16, 1), "float32")

    def arrive(_):
        time.sleep(MILLISECONDS.value / 1e3)
        return batch

    def slow(index):
        x, y = tf.numpy_function(arrive, [index], [tf.float32, tf.float32])
        return tf.ensure_shape(x, (16, 64)), tf.ensure_shape(y, (16, 1))

    rows = tf.data.Dataset.range(STEPS.value).map(slow)
    return lambda: model.fit(rows, verbose=0)


def seconds(jobs):
    """How long jobs take that begin together."""
    threads = [threading.Thread(target=each) for each in jobs]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start


def main(_):
    tfscale.use_virtual_devices(2)
    jobs = [job(), job()]
    for each in jobs:
        each()
    ratios = []
    for _ in range(PAIRS.value):
        alone, both = seconds(jobs[:1]), seconds(jobs)
        ratios.append(both / alone)
        print(f"one {alone:.2f} s, two {both:.2f} s: {ratios[-1]:.2f}")
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    app.run(main)
