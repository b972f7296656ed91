"""What `tfscale.callbacks.Throughput` costs a step of 20 ms.

    python -m benchmarks.throughput

Trains in turn with it and without it, one pair after the other, on short steps:
what the callback adds to a step does not depend on how long that is.
"""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from tfscale.callbacks import Throughput

PAIRS = flags.DEFINE_integer("pairs", 7, "Trainings of each kind.")
STEPS = flags.DEFINE_integer("steps", 1000, "Steps of a training.")
MILLISECONDS = 20.0  # of a step


class Ending(keras.callbacks.Callback):
    """A callback of a user's that looks at each step, as a bar does."""

    def on_train_batch_end(self, batch, logs=None):
        """Reads the loss."""
        del batch
        self.loss = logs["loss"]


def main(argv):
    """Prints the table of the README."""
    del argv
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            keras.layers.Embedding(256, 16),
            keras.layers.Dense(256),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    x = np.ones((8 * STEPS.value, 64), "int32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(8).prefetch(2)

    def seconds(*callbacks):
        clock, used = time.perf_counter(), time.process_time()
        model.fit(
            dataset, verbose=0, shuffle=False, callbacks=[Ending(), *callbacks]
        )
        return time.perf_counter() - clock, time.process_time() - used

    throughput = Throughput()
    seconds()
    seconds(throughput)
    pairs = [(seconds(), seconds(throughput)) for _ in range(PAIRS.value)]
    for name, index in (("clock", 0), ("processors", 1)):
        more = [
            1e3 * (with_it[index] - without[index]) / STEPS.value
            for without, with_it in pairs
        ]
        median = statistics.median(more)
        print(
            f"{name}: {median:.3f} ms more in a step, {min(more):.3f} to "
            f"{max(more):.3f}: {median / MILLISECONDS:.2%} of "
            f"{MILLISECONDS:.0f} ms"
        )


if __name__ == "__main__":
    app.run(main)
