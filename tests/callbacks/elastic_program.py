"""Trains in 2, 4 and 1 workers, one after the other in one run.

    python -m tfscale.launch ... -m tests.callbacks.elastic_program FOLDER

The last process trains the same on one device, and writes both results. A
worker is killed on the way, and taken back.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.backup import trainings
from tests.backup.workers_program import Total

ROWS, EPOCHS = 48, 3
PLAN = {0: 2, 1: 4, 2: 1}


class Kill(keras.callbacks.Callback):
    """Kills the second of two workers, in the first epoch."""

    def on_train_batch_end(self, batch, logs=None):
        config = json.loads(os.environ["TF_CONFIG"])
        is_second = config["task"]["index"] == 1
        if is_second and len(config["cluster"]["worker"]) == 2 and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class Counts(keras.callbacks.Callback):
    """Notes how many workers each step had."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.noted = []

    def on_train_batch_end(self, batch, logs=None):
        self.noted.append(self.count)

    def get_state(self):
        return {"noted": self.noted}

    def set_state(self, state):
        self.noted = list(state["noted"])


def rows():
    """Each has a number; sums of numbers and of their squares are exact."""
    x, _ = trainings.rows_of(1, ROWS)
    return x, np.arange(1.0, ROWS + 1, dtype="float32")[:, None] / 64


def train(strategy, callbacks):
    """Trains on 6 batches of 8 rows; the weights and the history."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = trainings.plain()
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            "mse",
            metrics=[Total(1), Total(2)],
        )
    history = model.fit(
        tfscale.data.pipeline(
            tfscale.data.arrays(*rows()), batch_size=8, seed=3
        ),
        epochs=EPOCHS,
        verbose=0,
        callbacks=callbacks,
    )
    values = [*model.variables, *model.optimizer.variables]
    return {
        "weights": [v.numpy().tolist() for v in values],
        "history": history.history,
    }


def main():
    folder = sys.argv[1]
    tfscale.initialize()
    count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    counts = Counts(count)
    found = train(
        tfscale.MeshStrategy(tfscale.device_mesh(data=count)),
        [
            tfscale.callbacks.ElasticWorkers(PLAN),
            tfscale.callbacks.BackupAndRestore(f"{folder}/runs", save_freq=1),
            counts,
            Kill(),
        ],
    )
    expected = train(tf.distribute.get_strategy(), [])
    with open(f"{folder}/found", "w") as file:
        json.dump([counts.noted, found, expected], file)


if __name__ == "__main__":
    main()
