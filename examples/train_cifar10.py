"""Trains a small convolutional network on pictures, on several devices.

    python -m examples.train_cifar10 --flagfile=configs/cifar10_mirrored.flags
    python -m examples.train_cifar10 --flagfile=configs/cifar10_pipeline.flags

`--dataset=cifar10` is downloaded by tensorflow-datasets, or read from
`--data_dir` if that has it; `--dataset=photo` needs no network. Without
accelerators, virtual CPU devices of one core each take their place.
"""

import os
import urllib.error
import urllib.request

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from examples import finite_float
from examples import photos
from tfscale import data

DATASET = flags.DEFINE_enum(
    "dataset", "cifar10", ["cifar10", "photo"], "What to learn from."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Where tensorflow-datasets keeps its data: a folder with cifar10/3.0.2. By "
    "default ~/tensorflow_datasets.",
)
STRATEGY = flags.DEFINE_enum(
    "strategy",
    "mirrored",
    ["mirrored", "pipeline"],
    "Copies of the model that share each batch, or one model in stages.",
)
NUM_DEVICES = flags.DEFINE_integer(
    "num_devices",
    None,
    "Copies or stages. By default all accelerators, or 2 where there are none.",
    lower_bound=1,
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches",
    8,
    "Microbatches in a step, for --strategy=pipeline.",
    lower_bound=1,
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Pictures in a step, over all devices.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 5, "Times to go through the pictures.", lower_bound=1
)
LEARNING_RATE = finite_float.define(
    "learning_rate", 1e-3, "Highest learning rate.", lower_bound=0.0
)
WIDTH = flags.DEFINE_integer(
    "width", 32, "Filters of the first layers.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, order and flips.")

flags.register_multi_flags_validator(
    ["batch_size", "num_microbatches", "strategy"],
    lambda values: (
        values["strategy"] != "pipeline"
        or values["batch_size"] % values["num_microbatches"] == 0
    ),
    "--batch_size must be a multiple of --num_microbatches.",
)
flags.register_multi_flags_validator(
    ["batch_size", "num_devices", "strategy"],
    lambda values: (
        values["strategy"] != "mirrored"
        or values["batch_size"] % (values["num_devices"] or 1) == 0
    ),
    "--batch_size must be a multiple of --num_devices.",
)

SERVER = "https://www.cs.toronto.edu"  # of CIFAR-10


def devices():
    """Names of the devices to use; virtual ones where there is no other."""
    accelerators = tf.config.list_physical_devices("GPU")
    if accelerators:
        kind, number = "GPU", NUM_DEVICES.value or len(accelerators)
    else:
        kind, number = "CPU", NUM_DEVICES.value or 2
        # One core is one device.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(number)
        tfscale.use_virtual_devices(number)
    return [f"{kind}:{index}" for index in range(number)]


def to_floats(image, label):
    """Deterministic, hence before the cache."""
    return tf.cast(image, tf.float32) / 255.0, label


def flip(image, label, seed):
    """Random, hence after the cache, and a function of the seed."""
    return tf.image.stateless_random_flip_left_right(image, seed), label


def brighten(image, label, seed):
    """As `flip`, which would change what a turned picture's label is."""
    return tf.image.stateless_random_brightness(image, 0.2, seed), label


def check_download():
    """Ends the program if the pictures are not here, and cannot be downloaded.

    tensorflow-datasets tries for minutes.
    """
    import tensorflow_datasets  # imported here, because it takes seconds

    builder = tensorflow_datasets.builder("cifar10", data_dir=DATA_DIR.value)
    if builder.is_prepared():
        return
    try:
        urllib.request.urlopen(SERVER, timeout=10.0).close()
    except urllib.error.HTTPError:  # it answers
        pass
    except OSError as error:
        raise SystemExit(
            f"CIFAR-10 is not in {builder.data_path}, and {SERVER} cannot be "
            f"reached: {error}. Set --data_dir to a folder where "
            "tensorflow-datasets has prepared it on another machine, or "
            "--dataset=photo, which needs no network."
        ) from None


def make_dataset(split):
    """Batches of one split; `train` is shuffled and augmented."""
    if DATASET.value == "photo":
        source, augment = photos.patches(split), brighten
    else:
        check_download()
        source = data.tfds("cifar10", split, data_dir=DATA_DIR.value)
        augment = flip
    training = split == "train"
    return data.pipeline(
        source,
        batch_size=BATCH_SIZE.value,
        parse=to_floats,
        augment=augment if training else None,
        shuffle=training,
        seed=SEED.value,
        remainder="drop" if training else "pad",
    )


def build_model(num_classes):
    """Three steps of convolutions, each half the size and twice as wide."""
    inputs = x = keras.Input((32, 32, 3))
    for depth in range(3):
        for _ in range(2):
            x = keras.layers.Conv2D(
                WIDTH.value << depth, 3, padding="same", use_bias=False
            )(x)
            x = keras.layers.BatchNormalization()(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def make_strategy(names):
    if STRATEGY.value == "mirrored":
        return tf.distribute.MirroredStrategy(names)
    return tfscale.MeshStrategy(tfscale.device_mesh(pipeline=len(names)))


def main(argv):
    del argv
    tf.get_logger().setLevel("WARNING")  # a MirroredStrategy names each sum
    keras.utils.set_random_seed(SEED.value)
    strategy = make_strategy(devices())
    train, test = make_dataset("train"), make_dataset("test")
    num_steps = NUM_EPOCHS.value * int(train.cardinality())
    with strategy.scope():
        model = build_model(10 if DATASET.value == "cifar10" else 4)
        if STRATEGY.value == "pipeline":
            model = tfscale.PipelineModel(
                model, num_microbatches=NUM_MICROBATCHES.value
            )
        model.compile(
            keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(
                    LEARNING_RATE.value, num_steps
                )
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
    model.fit(
        train,
        validation_data=test,
        epochs=NUM_EPOCHS.value,
        shuffle=False,  # the datasets do that
        verbose=2,
    )


if __name__ == "__main__":
    app.run(main)
