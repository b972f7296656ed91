"""How long it takes from one epoch to the next: tf.data ends an iterator.

python -m benchmarks.input_pipeline.epoch_ends
"""

import contextlib
import statistics
import time

import keras
import numpy as np
from absl import app
from absl import flags

import tfscale

_EPOCHS = flags.DEFINE_integer("epochs", 12, "Epochs of each `fit`.")
_BATCHES = flags.DEFINE_integer("batches", 12, "Batches of an epoch.")
_SECONDS = flags.DEFINE_float("seconds", 0.1, "What a batch takes.")


class Pauses(keras.callbacks.Callback):
    """Makes batches take a while, and times what lies between epochs."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self._last = None

    def on_train_batch_begin(self, batch, logs=None):
        """Keras has released the iterator of the epoch before."""
        if batch == 0 and self._last is not None:
            self.seconds.append(time.perf_counter() - self._last)

    def on_train_batch_end(self, batch, logs=None):
        """The batch takes that long."""
        time.sleep(_SECONDS.value)
        self._last = time.perf_counter()


def pauses_under(scope):
    """Seconds from the last batch of an epoch to the first of the next."""
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows, pauses = np.ones((32 * _BATCHES.value, 4), "float32"), Pauses()
    model.fit(
        rows, rows[:, :1], epochs=_EPOCHS.value, verbose=0, callbacks=[pauses]
    )
    return pauses.seconds


def main(argv):
    """Prints them for Keras alone and under a strategy."""
    del argv
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=1))
    scopes = {"Keras": contextlib.nullcontext(), "mesh": strategy.scope()}
    for name, scope in scopes.items():
        found = pauses_under(scope)
        print(
            f"{name}: {sum(found):.2f} s after {len(found)} epochs of "
            f"{_BATCHES.value * _SECONDS.value:.1f} s; median "
            f"{statistics.median(found):.3f} s, largest {max(found):.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
