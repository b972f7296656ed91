"""Time and steps to a loss: a fixed batch, and one that follows its noise.

    python -m benchmarks.batch_size

A small classifier begins with batches of 16 rows, each in two microbatches.
`GradientNoiseScale` doubles them up to 512 rows, with and without a learning
rate that follows. What is timed is `fit`, tracing included, up to the end of
the first epoch whose validation loss is at most `--loss`.
"""

import statistics
import time

import keras
import numpy as np
from absl import app
from absl import flags

import tfscale

_LOSS = flags.DEFINE_float("loss", 1.235, "Validation loss to reach.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Trainings of each kind.")
_EPOCHS = flags.DEFINE_integer("epochs", 24, "Epochs at the most.")
_ROWS = flags.DEFINE_integer("rows", 8192, "Records of an epoch.")

_KINDS = {
    "SGD, 16 rows": ("SGD", None),
    "SGD, adapted": ("SGD", {}),
    'SGD, adapted, "adascale"': ("SGD", {"learning_rate": "adascale"}),
    "Adam, 16 rows": ("Adam", None),
    "Adam, adapted": ("Adam", {}),
    'Adam, adapted, "sqrt"': ("Adam", {"learning_rate": "sqrt"}),
}


class _UntilLoss(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds = self.steps = None

    def on_train_begin(self, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_loss"] <= _LOSS.value:
            self.seconds = time.perf_counter() - self._start
            self.steps = int(self.model.optimizer.iterations.numpy())
            self.model.stop_training = True


def _records():
    """Vectors, and classes drawn from the logits of a random network."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(_ROWS.value + 8192, 32)).astype("float32")
    hidden = np.tanh(0.3 * x @ draw.normal(size=(32, 64)))
    logits = hidden @ draw.normal(size=(64, 10))
    y = np.argmax(logits + draw.gumbel(scale=2.0, size=logits.shape), axis=1)
    return x, y


def _train(kind, x, y):
    """Seconds and steps to the loss, each None if it is not reached."""
    name, arguments = _KINDS[kind]
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizers = {
        "SGD": keras.optimizers.SGD(0.01),
        "Adam": keras.optimizers.Adam(0.0002),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[name], loss)
    callbacks = [tfscale.callbacks.GradientAccumulation(2)]
    if arguments is not None:
        callbacks.append(
            tfscale.callbacks.GradientNoiseScale(
                batch_sizes=(16, 512), **arguments
            )
        )
    until = _UntilLoss()
    rows = _ROWS.value
    model.fit(
        tfscale.data.pipeline(
            tfscale.data.arrays(x[:rows], y[:rows]), batch_size=16, seed=1
        ),
        epochs=_EPOCHS.value,
        verbose=0,
        validation_data=(x[rows:], y[rows:]),
        validation_batch_size=4096,
        callbacks=[*callbacks, until],
    )
    return until.seconds, until.steps


def main(argv):
    del argv
    x, y = _records()
    found = {kind: [] for kind in _KINDS}
    for _ in range(_ROUNDS.value):
        for kind, results in found.items():
            results.append(_train(kind, x, y))
    print(f"| to a validation loss of {_LOSS.value} | seconds | steps |")
    print("|---|---|---|")
    for kind, results in found.items():
        seconds, steps = zip(*results)
        if None in steps:
            print(f"| {kind} | not in {_EPOCHS.value} epochs | |")
            continue
        median = statistics.median(seconds)
        each = ", ".join(f"{s:.1f}" for s in seconds)
        print(f"| {kind} | {median:.1f} ({each}) | {steps[0]:,} |")


if __name__ == "__main__":
    app.run(main)
