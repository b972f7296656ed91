"""Trains with other workers, of which the last one is killed in a step.

`python -m tests.cluster.lost_worker FOLDER`, by lost_worker_test.py.
"""

import os
import signal
import sys
import time

import keras
import tensorflow as tf

import tfscale
from tfscale.cluster import cluster_from_environment


class Kill(keras.callbacks.Callback):
    """Kills this process after some steps, as the kernel does it."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print(f"the last words, at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    tfscale.initialize()
    count = len(cluster_from_environment().addresses)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=count))
    workers = strategy.extended.workers
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    batch = tf.zeros((6, 2)), tf.zeros((6, 1))
    model.fit(
        tf.data.Dataset.from_tensors(batch).repeat(),
        steps_per_epoch=1_000_000,
        shuffle=False,
        verbose=0,
        callbacks=[
            *([Kill()] if workers.index == count - 1 else []),
            # Its thread waits for what the others write.
            tfscale.callbacks.BackupAndRestore(
                os.path.join(sys.argv[-1], "backups"), save_freq=1
            ),
        ],
    )


if __name__ == "__main__":
    main()
