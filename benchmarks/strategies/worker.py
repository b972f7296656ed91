"""Trains a GPT under a strategy; a line that comes in is a turn of steps."""

import contextlib
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline import worker


def make_strategy(name):
    """The strategy of a configuration, or None. A device is one core."""
    num_devices = 2 if name in ("mirrored", "mesh") else 1
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    if name == "one":
        return None
    if name == "workers":
        tfscale.initialize()
    else:
        tfscale.use_virtual_devices(num_devices)
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


def main():
    config = json.loads(sys.argv[1])
    keras.config.disable_interactive_logging()
    strategy = make_strategy(config["strategy"])
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = worker.make_model(config)
    generator = np.random.default_rng(0)
    tokens = generator.integers(
        worker.VOCABULARY, size=(config["batch"], config["length"] + 1)
    ).astype("int32")
    batches = tf.data.Dataset.from_tensors(
        (tokens[:, :-1], tokens[:, 1:])
    ).repeat()

    def fit(steps):
        model.fit(batches, steps_per_epoch=steps, verbose=0)

    fit(2)
    for _ in sys.stdin:
        start = time.perf_counter()
        fit(config["steps"])
        seconds = (time.perf_counter() - start) / config["steps"]
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
