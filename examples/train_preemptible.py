"""Trains, is killed, and goes on: a run that ends as if nothing had happened.

    python -m examples.train_preemptible --flagfile=configs/preemptible.flags

The program starts itself as the training, kills that with SIGKILL after some
steps, and starts it again, until it has ended. Then it trains once without an
interruption and compares the weights, bit for bit.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile

from absl import app
from absl import flags

NUM_KILLS = flags.DEFINE_integer(
    "num_kills", 3, "How often to kill the training.", lower_bound=0
)
STEPS_TO_KILL = flags.DEFINE_integer(
    "steps_to_kill", 40, "Steps that each is given.", lower_bound=1
)
SAVE_FREQ = flags.DEFINE_integer(
    "save_freq", 15, "Steps between two backups.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 3, "Epochs to train.", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Pictures of a batch.", lower_bound=1
)
BACKUP_DIR = flags.DEFINE_string(
    "backup_dir", None, "Where to train, as a process that may be killed."
)


def train():
    """Trains a small convolutional network on patches of photographs."""
    # Once it is known that this is a training: the parent only waits.
    import keras
    import tensorflow as tf

    import tfscale
    from examples import photos
    from tfscale import data

    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    pictures = data.pipeline(
        photos.patches("train", size=16),
        batch_size=BATCH_SIZE.value,
        parse=lambda picture, label: (tf.cast(picture, "float32") / 255, label),
        augment=lambda picture, label, seed: (
            tf.image.stateless_random_flip_left_right(picture, seed),
            label,
        ),
        seed=0,
    )
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

    class Print(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print("step", model.optimizer.iterations.numpy(), flush=True)

    backup = tfscale.callbacks.BackupAndRestore(
        BACKUP_DIR.value, save_freq=SAVE_FREQ.value
    )
    model.fit(
        pictures,
        epochs=NUM_EPOCHS.value,
        verbose=0,
        callbacks=[backup, Print()],
    )
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)


def run(backup_dir, steps_to_kill=None):
    """Runs the training; returns the digest of its weights, None if killed."""
    command = [
        *(sys.executable, "-m", "examples.train_preemptible"),
        f"--backup_dir={backup_dir}",
        f"--save_freq={SAVE_FREQ.value}",
        f"--num_epochs={NUM_EPOCHS.value}",
        f"--batch_size={BATCH_SIZE.value}",
    ]
    steps = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as process:
        for line in process.stdout:
            steps += [int(n) for n in re.findall(r"^step (\d+)", line)]
            if line.startswith("weights "):
                print(f"trained from step {steps[0]} to {steps[-1]}")
                return line.split()[1]
            if steps_to_kill and len(steps) == steps_to_kill:
                process.send_signal(signal.SIGKILL)
    if process.returncode != -signal.SIGKILL:
        sys.exit(f"The training failed with {process.returncode}.")
    print(f"trained from step {steps[0]} to {steps[-1]}, then killed")
    return None


def main(_):
    if BACKUP_DIR.value:
        train()
        return
    with tempfile.TemporaryDirectory() as folder:
        found = None
        for _ in range(NUM_KILLS.value):
            found = found or run(f"{folder}/killed", STEPS_TO_KILL.value)
        found = found or run(f"{folder}/killed")
        print("without an interruption:")
        expected = run(f"{folder}/whole")
    if found != expected:
        sys.exit("The weights differ.")
    print("The weights are the same, bit for bit.")


if __name__ == "__main__":
    app.run(main)
