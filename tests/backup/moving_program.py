"""Trains on two replicas, in as many workers as there are, until it is told.

    python -m tfscale.launch --num_workers=2 --devices_per_worker=1 \
        -m tests.backup.moving_program FOLDER

Alone it goes on in one process with two devices, and likewise on a mesh of two
model ranks; then it trains without an interruption, and writes all three.
"""

import json
import os
import shutil
import sys
import time

import keras

import tfscale
from tests.backup import trainings

MESH = {"data": 2}


class Say(keras.callbacks.Callback):
    """Prints the steps that were made, and takes time for each."""

    def __init__(self):
        super().__init__()
        self.made = []

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.made.append([self._epoch, batch])
        print("step", self._epoch, batch, flush=True)
        if "TF_CONFIG" in os.environ:
            time.sleep(0.2)


def train(folder, mesh=None):
    """Trains on a mesh, from a backup if there is one."""
    keras.utils.set_random_seed(5)
    with trainings.mesh_strategy(mesh or MESH, {}).scope():
        model = trainings.plain()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    say = Say()
    history = model.fit(
        trainings.DATA["tfscale"](8)[0],
        epochs=3,
        verbose=0,
        callbacks=[say, tfscale.callbacks.BackupAndRestore(folder)],
    )
    values = [*model.variables, *model.optimizer.variables]
    return {
        "made": say.made,
        "loss": history.history["loss"],
        "weights": [v.numpy().tolist() for v in values],
    }


def main():
    folder = sys.argv[1]
    if "TF_CONFIG" not in os.environ:
        tfscale.use_virtual_devices(2)
    tfscale.initialize()
    if "TF_CONFIG" in os.environ:
        train(f"{folder}/runs")
        return
    shutil.copytree(f"{folder}/runs", f"{folder}/copy")
    found = {
        "moved": train(f"{folder}/runs"),
        "another mesh": train(f"{folder}/copy", {"model": 2}),
        "whole": train(f"{folder}/whole"),
    }
    with open(f"{folder}/found", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
