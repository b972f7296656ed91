"""Trains with the batch that pays off, through kills.

    python -m examples.train_large_batch --flagfile=configs/large_batch.flags

Two numbers are left to tfscale: the batch size, which follows the noise of the
gradients, and the steps between two backups, which follow from what a backup
costs. Each batch runs in microbatches. Start the program again after a kill,
and it continues at the last saved step.
"""

import os

import keras
from absl import app
from absl import flags

import tfscale
from examples import meshes
from tfscale import data

NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas", 2, "Replicas, each on a device.", lower_bound=1
)
BATCH_SIZES = flags.DEFINE_list(
    "batch_sizes", ["16", "512"], "The smallest and the largest batch."
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches", 2, "Microbatches of each batch.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 4, "Epochs to train.", lower_bound=1
)
FILES = flags.DEFINE_string("files", "[a-c]*.py", "Modules to train on.")
BACKUP_DIR = flags.DEFINE_string(
    "backup_dir", "large_batch_backups", "Folder of the backups."
)


def make_data(batch_size):
    """Bytes of some modules of Python, and the byte after each."""
    files = os.path.join(os.path.dirname(os.__file__), FILES.value)
    return data.pipeline(
        data.text(files, length=64), batch_size=batch_size, remainder="drop"
    )


def make_model():
    """A small convolutional network that predicts the next byte."""
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            keras.layers.Embedding(256, 32),
            keras.layers.Conv1D(64, 5, padding="causal", activation="relu"),
            keras.layers.Dense(256),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def main(_):
    smallest, largest = map(int, BATCH_SIZES.value)
    mesh = meshes.make_mesh(data=NUM_REPLICAS.value, pipeline=1)
    with tfscale.MeshStrategy(mesh).scope():
        model = make_model()
    accumulation = tfscale.callbacks.GradientAccumulation(
        NUM_MICROBATCHES.value
    )
    noise = tfscale.callbacks.GradientNoiseScale(
        batch_sizes=(smallest, largest), learning_rate="sqrt"
    )
    backup = tfscale.callbacks.BackupAndRestore(
        BACKUP_DIR.value, save_freq="auto"
    )
    report = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(
            f"epoch {epoch}: loss {logs['loss']:.3f}, batches of "
            f"{logs['batch_size']:.0f} rows, noise scale "
            f"{logs['gradient_noise_scale']:.0f} rows"
        )
    )
    model.fit(
        make_data(smallest),
        epochs=NUM_EPOCHS.value,
        verbose=0,
        callbacks=[accumulation, noise, backup, report],
    )


if __name__ == "__main__":
    app.run(main)
