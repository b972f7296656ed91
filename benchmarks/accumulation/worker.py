"""Trains a GPT on one core; a line that comes in is a turn of some steps."""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline import worker


def main():
    config = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.disable_interactive_logging()
    model = worker.make_model(config)
    generator = np.random.default_rng(0)
    tokens = generator.integers(
        worker.VOCABULARY, size=(config["batch"], config["length"] + 1)
    ).astype("int32")
    batches = tf.data.Dataset.from_tensors(
        (tokens[:, :-1], tokens[:, 1:])
    ).repeat()
    # Of one microbatch it is plain Keras.
    callback = tfscale.callbacks.GradientAccumulation(config["microbatches"])

    def fit(steps):
        model.fit(
            batches, steps_per_epoch=steps, verbose=0, callbacks=[callback]
        )

    fit(2)
    for _ in sys.stdin:
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        start = time.process_time()
        fit(config["steps"])
        seconds = (time.process_time() - start) / config["steps"]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "bytes": peak - before,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
