"""Trains in real workers that are killed, stopped, and started again.

    python -m tests.backup.workers_program FOLDER [sizes]
    python -m tfscale.launch ... -m tests.backup.workers_program FOLDER

It imports TensorFlow once, and becomes each worker by a fork before TensorFlow
has started.
"""

import json
import os
import shutil
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests import forked_processes
from tests.backup import trainings
from tfscale.cluster import Cluster

_SECONDS = 120
NUMBERS = 96


class At(keras.callbacks.Callback):
    """Notes the steps that were made, and does something at one of them."""

    def __init__(self, steps, action):
        super().__init__()
        self._steps, self._action = steps, action
        self.made = []
        self.tested = []

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.made.append([self._epoch, batch, logs["loss"]])
        time.sleep(0.11)  # they agree ten times a second
        if len(self.made) == self._steps:
            self._action()

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append([batch, logs["loss"]])


def train(index, count, folder, result, steps=None, number=None):
    """Trains on two replicas: in so many workers."""
    tf.config.experimental.enable_op_determinism()
    os.environ["TFSCALE_VIRTUAL_DEVICES"] = str(2 // count)
    if count == 1:
        tfscale.use_virtual_devices(2)
    tfscale.initialize()
    keras.utils.set_random_seed(5)
    with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
        model = trainings.normalized()
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True),
            "mse",
            metrics=["mae"],
        )
    seen = At(steps, lambda: os.kill(os.getpid(), number))
    x, _ = trainings.DATA["tfscale"](8)
    backup = tfscale.callbacks.BackupAndRestore(folder, save_freq=2)
    # Worker 1 may have others.
    others = [trainings.Lambda()] * index
    status = "ended"
    try:
        history = model.fit(
            x,
            epochs=2,
            verbose=0,
            callbacks=[seen, *others, backup],
            validation_data=trainings.shuffled(8),
        )
    except SystemExit as error:
        status, history = error.code, None
    with open(f"{result}_{index}", "w") as file:
        json.dump(
            {
                "status": status,
                "made": seen.made,
                "tested": seen.tested,
                "history": history and history.history,
                "weights": [
                    v.numpy().tolist()
                    for v in [*model.variables, *model.optimizer.variables]
                ],
            },
            file,
        )


class Total(keras.metrics.Metric):
    """Adds up a power of the numbers that were trained on."""

    def __init__(self, power):
        super().__init__(name=f"total_{power}")
        self._power = power
        self._total = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self._total.assign_add(keras.ops.sum(y_true**self._power))

    def result(self):
        return keras.ops.copy(self._total)


def count(index, count, folder, result, batch_size, steps=None, number=None):
    """Trains on distinct integers, in so many workers of a device each."""
    tfscale.initialize()
    with tfscale.MeshStrategy(tfscale.device_mesh(data=count)).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(1e-6), "mse", metrics=[Total(1), Total(2)]
        )
    numbers = np.arange(1.0, NUMBERS + 1, dtype="float32")[:, None]
    rows = tfscale.data.pipeline(
        tfscale.data.arrays(numbers, numbers), batch_size=batch_size, seed=3
    )
    seen = At(steps, lambda: os.kill(os.getpid(), number))
    backup = tfscale.callbacks.BackupAndRestore(folder, save_freq=1)
    history = model.fit(rows, epochs=2, verbose=0, callbacks=[seen, backup])
    with open(f"{result}_{index}", "w") as file:
        json.dump({"history": history.history, "made": seen.made}, file)


def start(index, addresses, arguments):
    def work():
        if len(addresses) > 1:
            cluster = Cluster({"worker": addresses}, "worker", index)
            os.environ["TF_CONFIG"] = cluster.to_tf_config()
        program = count if "batch_size" in arguments else train
        program(index, len(addresses), **arguments)

    return forked_processes.fork(work)


def run(count, of_one=None, **arguments):
    """Runs workers to their end, or until one is killed: then kills all."""
    addresses = forked_processes.free_addresses(count)
    children = {}
    for index in range(count):
        # One of them is killed, or asked to stop.
        own = of_one if of_one and index == count - 1 else {}
        children[start(index, addresses, {**arguments, **own})] = index
    end = time.monotonic() + _SECONDS
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            print(arguments, "worker", children.pop(pid), status, flush=True)
        if (pid and status) or time.monotonic() > end:
            forked_processes.kill(children)
            if not of_one or of_one["number"] != signal.SIGKILL:
                sys.exit("A worker has failed, or took too long.")
            return
        time.sleep(0.02)


def launched():
    """One of the workers that the launcher starts; the last is killed."""
    config = json.loads(os.environ["TF_CONFIG"])
    index, workers = config["task"]["index"], len(config["cluster"]["worker"])
    killed = dict(steps=3, number=int(signal.SIGKILL))
    count(
        index,
        workers,
        folder=f"{sys.argv[1]}/runs",
        result=f"{sys.argv[1]}/counted_by_{workers}",
        batch_size=12,
        **(killed if workers == 2 and index == 1 else {}),
    )


def train_in_other_numbers(folder):
    """Of workers: all but the last are killed within the first epoch."""
    killed = dict(steps=3, number=int(signal.SIGKILL))
    sizes = dict(folder=f"{folder}/sizes", result=f"{folder}/counted")
    for workers, batch_size in ((1, 12), (4, 8), (2, 6)):
        run(workers, killed, batch_size=batch_size, **sizes)
    run(3, batch_size=12, **sizes)


def main():
    if "TF_CONFIG" in os.environ:
        launched()
        return
    folder = sys.argv[1]
    if sys.argv[2:] == ["sizes"]:
        train_in_other_numbers(folder)
        return
    runs = f"{folder}/runs"
    run(2, folder=f"{folder}/whole", result=f"{folder}/whole")
    run(
        2,
        folder=runs,
        result=f"{folder}/killed",
        of_one=dict(steps=6, number=int(signal.SIGKILL)),
    )
    run(
        2,
        folder=runs,
        result=f"{folder}/stopped",
        of_one=dict(steps=3, number=int(signal.SIGTERM)),
    )
    shutil.copytree(runs, f"{folder}/alone_runs")
    run(2, folder=runs, result=f"{folder}/end")
    run(1, folder=f"{folder}/alone_runs", result=f"{folder}/alone")


if __name__ == "__main__":
    main()
