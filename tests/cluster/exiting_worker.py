"""Trains with other workers, of which the last one exits in a step.

`python -m tests.cluster.exiting_worker FOLDER`, by lost_worker_test.py. Before
that it has another version of Keras, and is not let in.
"""

import atexit
import os
import signal
import sys
import time
from unittest import mock

import keras
import tensorflow as tf

import tfscale
from tfscale.cluster import cluster_from_environment


class Exit(keras.callbacks.Callback):
    """Ends this process after some steps, by no error."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print(f"the last words, at {time.time()}", flush=True)
            sys.exit(3)


def wait_for_all(cluster, folder):
    """Until each has been refused: a call must not be of the time before."""
    count = len(cluster.addresses)
    names = [os.path.join(folder, f"{i}.refused") for i in range(count)]
    open(names[cluster.index], "w").close()
    while not all(map(os.path.exists, names)):
        time.sleep(0.02)


def main():
    cluster = cluster_from_environment()
    count = len(cluster.addresses)
    is_last = cluster.index == count - 1
    version = "3.9.9" if is_last else keras.__version__
    with mock.patch.object(keras, "__version__", version):
        try:
            tfscale.initialize()
        except ValueError as error:
            print(error, flush=True)
    wait_for_all(cluster, sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
    tfscale.initialize()
    os.kill(os.getpid(), signal.SIGTERM)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=count))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    batch = tf.zeros((6, 2)), tf.zeros((6, 1))
    try:
        model.fit(
            tf.data.Dataset.from_tensors(batch).repeat(),
            steps_per_epoch=1_000_000,
            shuffle=False,
            verbose=0,
            callbacks=[Exit()] if is_last else [],
        )
    except SystemExit:
        # As at the end of a program, which a fork has not.
        atexit._run_exitfuncs()
        print(f"ended at {time.time()}", flush=True)
        raise


if __name__ == "__main__":
    main()
