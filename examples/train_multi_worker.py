"""Trains a byte-level GPT in several processes, on one machine or on many.

    python -m examples.train_multi_worker --flagfile=configs/multi_worker.flags

By itself it starts two workers on this machine. Where something else has
started it as one of several (`python -m tfscale.launch --hosts=...`, Slurm,
Kubernetes), it is a worker of those: the script is the same.
"""

import os
import sys

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from examples import gpt
from examples import texts
from examples import training_flags as shared
from tfscale.cluster import cluster_from_environment

flags.adopt_module_key_flags(shared)
flags.set_default(shared.NUM_REPLICAS, 2)  # one in each worker

NUM_WORKERS = flags.DEFINE_integer(
    "num_workers",
    2,
    "Workers that it starts on this machine, if nobody has started it as one.",
    lower_bound=1,
)
NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", 2, "Number of transformer blocks.", lower_bound=1
)
MODEL_FILE = flags.DEFINE_string(
    "model_file", "gpt.keras", "Where worker 0 saves the model."
)


def launch():
    """Becomes the launcher, which starts this program in each worker."""
    replicas, more = divmod(shared.NUM_REPLICAS.value, NUM_WORKERS.value)
    if more:
        raise app.UsageError(
            "--num_replicas must be a multiple of --num_workers."
        )
    command = [
        *(sys.executable, "-m", "tfscale.launch"),
        f"--num_workers={NUM_WORKERS.value}",
        f"--devices_per_worker={replicas}",
        # With a value: or absl would look for flag files behind the name.
        *("--module=true", "examples.train_multi_worker", *sys.argv[1:]),
    ]
    os.execv(sys.executable, command)


def main(argv):
    del argv
    if cluster_from_environment() is None:
        launch()
    if not tf.config.list_physical_devices("GPU"):
        # One core is one device.
        tf.config.threading.set_intra_op_parallelism_threads(1)
    tfscale.initialize()
    mesh = tfscale.device_mesh(data=shared.NUM_REPLICAS.value)
    strategy = tfscale.MeshStrategy(mesh)

    # Each worker draws weights of its own; all begin with those of worker 0.
    keras.utils.set_random_seed(shared.SEED.value)
    with strategy.scope():
        model = gpt.build_gpt(
            NUM_BLOCKS.value,
            shared.WIDTH.value,
            shared.NUM_HEADS.value,
            shared.SEQUENCE_LENGTH.value,
            shared.DROPOUT.value,
        )
        model.compile(
            keras.optimizers.Adam(
                shared.LEARNING_RATE.value, global_clipnorm=1.0
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    def windows(part):
        """Its own part of each batch for every worker."""
        return strategy.distribute_datasets_from_function(
            lambda context: texts.make_datasets(
                shared.TEXT_FILES.value,
                shared.SEQUENCE_LENGTH.value,
                shared.BATCH_SIZE.value,
                shared.SEED.value,
                input_context=context,
            )[part]
        )

    model.fit(
        windows(0),
        validation_data=windows(1),
        epochs=shared.NUM_EPOCHS.value,
        steps_per_epoch=shared.STEPS_PER_EPOCH.value,
        validation_steps=shared.VALIDATION_STEPS.value,
        shuffle=False,  # the datasets do that
        # All have the same numbers: one shows them.
        verbose=2 if strategy.is_chief else 0,
    )
    if strategy.is_chief:
        model.save(MODEL_FILE.value)
        print(f"Saved {MODEL_FILE.value}.")


if __name__ == "__main__":
    app.run(main)
