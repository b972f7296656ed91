"""Flags of the examples that train a language model on bytes of text."""

from absl import flags

from examples import finite_float
from examples import texts

TEXT_FILES = flags.DEFINE_string(
    "text_files",
    texts.STANDARD_LIBRARY,
    "Glob of the files to learn from; every twentieth is for validation.",
)
WIDTH = flags.DEFINE_integer(
    "width",
    128,
    "Size of a token's vector; a multiple of --num_heads.",
    lower_bound=1,
)
NUM_HEADS = flags.DEFINE_integer(
    "num_heads", 4, "Number of attention heads.", lower_bound=1
)
SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length",
    128,
    "Number of bytes that the model reads.",
    lower_bound=1,
)
DROPOUT = finite_float.define(
    "dropout", 0.0, "Dropout rate.", lower_bound=0.0, upper_bound=0.9
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Sequences per step, over all replicas.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs",
    4,
    "Number of times to train and then validate.",
    lower_bound=1,
)
STEPS_PER_EPOCH = flags.DEFINE_integer(
    "steps_per_epoch", 75, "Optimizer steps in an epoch.", lower_bound=1
)
VALIDATION_STEPS = flags.DEFINE_integer(
    "validation_steps", 10, "Batches of each validation.", lower_bound=1
)
LEARNING_RATE = finite_float.define(
    "learning_rate", 3e-3, "Learning rate, the highest.", lower_bound=0.0
)
NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas",
    1,
    "Copies of the model (data parallelism).",
    lower_bound=1,
)
ZERO_STAGE = flags.DEFINE_integer(
    "zero_stage",
    0,
    "1 to divide the slots of the optimizer over the replicas, 2 accumulated "
    "gradients too, 3 weights too.",
    lower_bound=0,
    upper_bound=3,
)
MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel",
    1,
    "Devices that each layer is split over (tensor parallelism); divides "
    "--num_heads.",
    lower_bound=1,
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and order.")

flags.register_multi_flags_validator(
    ["width", "num_heads"],
    lambda values: values["width"] % values["num_heads"] == 0,
    "--width must be a multiple of --num_heads.",
)
flags.register_multi_flags_validator(
    ["batch_size", "num_replicas"],
    lambda values: values["batch_size"] % values["num_replicas"] == 0,
    "--batch_size must be a multiple of --num_replicas.",
)
flags.register_multi_flags_validator(
    ["num_heads", "model_parallel"],
    lambda values: values["num_heads"] % values["model_parallel"] == 0,
    "--num_heads must be a multiple of --model_parallel.",
)
