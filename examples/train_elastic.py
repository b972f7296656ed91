"""Trains with few workers early and more of them late, against a fixed number.

    python -m examples.train_elastic --flagfile=configs/elastic.flags

A batch has `--batch_size` rows for each worker, and the learning rate follows
its size: small batches early, when each step is far from the minimum, and large
ones late, when more devices pay (Smith et al., "Don't Decay the Learning Rate,
Increase the Batch Size", 2018). The program has the launcher start itself twice
on this machine, with the plan and with its largest number of workers all along,
and prints the losses of both by epoch and the device hours that they took:
workers times the time of an epoch, with the trace of its first step, without
the starts of processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

import tfscale
from examples import mlp
from tfscale.cluster import cluster_from_environment

PLAN = flags.DEFINE_list(
    "plan", ["0:1", "3:2"], "Numbers of workers by the epoch that they begin."
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.01, "Of one worker; so much for each.", lower_bound=0.0
)
FOLDER = flags.DEFINE_string(
    "folder", None, "Backups and results; the program sets it for its workers."
)


class Record(keras.callbacks.Callback):
    """Notes each epoch, in the backup too: an epoch is noted once."""

    def __init__(self, num_workers):
        super().__init__()
        self.epochs = []
        self._num_workers = num_workers

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.monotonic() - self._begin
        self.epochs.append(
            {
                "workers": self._num_workers,
                "loss": logs["loss"],
                "val_loss": logs["val_loss"],
                "seconds": self._num_workers * seconds,
            }
        )

    def get_state(self):
        return {"epochs": self.epochs}

    def set_state(self, state):
        self.epochs = list(state["epochs"])


def train(plan):
    """A worker: trains until the plan has another number of workers."""
    logging.set_verbosity(logging.WARNING)
    if not tf.config.list_physical_devices("GPU"):
        # One core is one device.
        tf.config.threading.set_intra_op_parallelism_threads(1)
    tfscale.initialize()
    num_workers = len(cluster_from_environment().addresses)
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=num_workers))
    keras.utils.set_random_seed(mlp.SEED.value)
    with strategy.scope():
        model = mlp.build(64)
        model.compile(
            keras.optimizers.SGD(
                num_workers * LEARNING_RATE.value, momentum=0.9
            ),
            mlp.hard_loss(),
        )
    rows = tfscale.data.arrays(mlp.clusters(mlp.NUM_ROWS.value, seed=0))
    record = Record(num_workers)
    model.fit(
        tfscale.data.pipeline(
            rows, batch_size=num_workers * mlp.BATCH_SIZE.value, seed=1
        ),
        validation_data=mlp.clusters(mlp.NUM_ROWS.value // 4, seed=1),
        epochs=mlp.NUM_EPOCHS.value,
        shuffle=False,  # the pipeline does that
        verbose=0,
        callbacks=[
            tfscale.callbacks.ElasticWorkers(plan, learning_rate="linear"),
            tfscale.callbacks.BackupAndRestore(f"{FOLDER.value}/backups"),
            record,
        ],
    )
    if strategy.is_chief:
        with open(f"{FOLDER.value}/epochs.json", "w") as file:
            json.dump(record.epochs, file)


def run(plan):
    """Trains by a plan, in processes; what they noted of each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "tfscale.launch"),
                f"--num_workers={plan[0]}",
                f"--min_workers={min(plan.values())}",
                f"--max_workers={max(plan.values())}",
                # With a value: or absl would look for flag files behind it.
                *("--devices_per_worker=1", "--module=true"),
                *("examples.train_elastic", *sys.argv[1:]),
                "--plan=" + ",".join(f"{e}:{n}" for e, n in plan.items()),
                f"--folder={folder}",
            ],
            check=True,
        )
        with open(f"{folder}/epochs.json") as file:
            return json.load(file)


def parsed_plan():
    """Workers by epoch."""
    try:
        pairs = (pair.split(":") for pair in PLAN.value)
        plan = {int(epoch): int(count) for epoch, count in pairs}
    except ValueError:
        plan = {}
    if 0 not in plan or min(plan.values()) < 1:
        raise app.UsageError(
            "--plan has epochs, from 0 on, and numbers of workers, as 0:1,3:2. "
            f"Received: --plan={','.join(PLAN.value)}."
        )
    return plan


def main(argv):
    del argv
    plan = parsed_plan()
    if FOLDER.value:
        train(plan)
        return
    fixed = {0: max(plan.values())}
    totals = []
    for each in (plan, fixed):
        epochs = run(each)
        print(f"{each}:\nepoch workers   loss val_loss device seconds")
        for number, epoch in enumerate(epochs):
            print(
                f"{number:5d} {epoch['workers']:7d} {epoch['loss']:6.4f} "
                f"{epoch['val_loss']:8.4f} {epoch['seconds']:14.2f}"
            )
        hours = sum(epoch["seconds"] for epoch in epochs) / 3600
        totals.append(
            f"{hours:.5f} device hours to a loss of {epochs[-1]['loss']:.4f}"
        )
    print(f"The plan: {totals[0]}; {fixed[0]} workers: {totals[1]}.")


if __name__ == "__main__":
    app.run(main)
