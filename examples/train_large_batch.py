"""Trains with the batch that pays off, in the memory at hand, through kills.

    python -m examples.train_large_batch --flagfile=configs/large_batch.flags

Three numbers are left to tfscale: the batch size, which follows the noise of
the gradients, the microbatches, which follow from the memory, and the steps
between two backups, which follow from what a backup costs. Start the program
again after a kill, and it continues at the last saved step.
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
MEMORY = flags.DEFINE_integer(
    "memory", None, "MiB of each device that training may use.", lower_bound=1
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
    # The memory of a step is estimated from its graph: no XLA.
    model.compile("adam", loss, jit_compile=False)
    return model


def main(_):
    smallest, largest = map(int, BATCH_SIZES.value)
    mesh = meshes.make_mesh(data=NUM_REPLICAS.value, pipeline=1)
    with tfscale.MeshStrategy(mesh).scope():
        model = make_model()
    accumulation = tfscale.callbacks.GradientAccumulation(
        "auto", memory_limit=MEMORY.value and MEMORY.value << 20
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
            f"{logs['batch_size']:.0f} rows in "
            f"{accumulation.found_num_microbatches} microbatches, noise scale "
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
