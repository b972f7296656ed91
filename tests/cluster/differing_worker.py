"""Trains with other workers, of which one does something by itself.

`WHAT=evaluates WHO=1 python -m tests.cluster.differing_worker FOLDER`, by
lost_worker_test.py.
"""

import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.cluster import cluster_from_environment

X, Y = np.zeros((6, 2), "float32"), np.zeros((6, 1), "float32")


def make_variables(model):
    with model.distribute_strategy.scope():
        keras.layers.Dense(1).build((None, 2))


DOES = {
    "evaluates": lambda model: model.evaluate(X, Y, verbose=0),
    "predicts": lambda model: model.predict(X, verbose=0),
    "trains": lambda model: model.train_on_batch(X, Y),
    "tests": lambda model: model.test_on_batch(X, Y),
    "fits": lambda model: model.fit(X, Y, verbose=0, shuffle=False),
    "makes variables": make_variables,
}


class Differs(keras.callbacks.Callback):
    """Does something in this worker, as a callback for its chief would."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print(f"the last words, at {time.time()}", flush=True)
            DOES[os.environ["WHAT"]](self.model)


def main():
    tfscale.initialize()
    count = len(cluster_from_environment().addresses)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=count))
    is_here = strategy.extended.workers.index == int(os.environ["WHO"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(
        tf.data.Dataset.from_tensors((X, Y)).repeat(),
        steps_per_epoch=1_000,
        shuffle=False,
        verbose=0,
        callbacks=[Differs()] if is_here else [],
    )


if __name__ == "__main__":
    main()
