"""Splits a causal language model of keras_hub over devices and trains it on.

    python -m examples.finetune_causal_lm \
        --flagfile=configs/finetune_causal_lm.flags

The model is keras_hub's, unmodified, of the sizes that the flags say and with
random weights or those of `--initial_weights`; nothing is downloaded. A token
is a byte of the Python standard library's source. Without accelerators, virtual
CPU devices of one core each take their place.
"""

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from examples import meshes
from examples import texts

FAMILY = flags.DEFINE_enum(
    "family", "llama", ["llama", "gpt2", "gemma"], "Whose architecture."
)
NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", 4, "Number of transformer layers.", lower_bound=1
)
WIDTH = flags.DEFINE_integer(
    "width",
    128,
    "Size of a token's vector; a multiple of --num_heads.",
    lower_bound=1,
)
HIDDEN_WIDTH = flags.DEFINE_integer(
    "hidden_width", 384, "Hidden units of each MLP; even.", lower_bound=2
)
NUM_HEADS = flags.DEFINE_integer(
    "num_heads", 4, "Number of attention heads.", lower_bound=1
)
NUM_KEY_VALUE_HEADS = flags.DEFINE_integer(
    "num_key_value_heads",
    None,
    "Heads of keys and values, fewer than --num_heads for grouped queries; "
    "gpt2 has no such thing. By default --num_heads.",
    lower_bound=1,
)
DROPOUT = flags.DEFINE_float(
    "dropout", 0.0, "Dropout rate.", lower_bound=0.0, upper_bound=0.9
)
INITIAL_WEIGHTS = flags.DEFINE_string(
    "initial_weights",
    None,
    "File of weights to begin with, as --weights_file of an earlier run of the "
    "same model on any mesh. Random by default.",
)
LAYOUT = flags.DEFINE_enum(
    "layout",
    "auto",
    ["auto", "backbone"],
    "Who says how weights are divided: tfscale.auto_layout_map, or the "
    "backbone's own get_layout_map (llama, gemma).",
)
MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel",
    2,
    "Devices that each layer is split over; divides --num_heads.",
    lower_bound=1,
)
NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas", 1, "Copies of the model.", lower_bound=1
)
TEXT_FILES = flags.DEFINE_string(
    "text_files",
    texts.STANDARD_LIBRARY,
    "Glob of the files to learn from; every twentieth is for validation.",
)
SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", 64, "Bytes that the model reads.", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Sequences per step, over all replicas.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 3, "Times to train and then validate.", lower_bound=1
)
STEPS_PER_EPOCH = flags.DEFINE_integer(
    "steps_per_epoch", 50, "Optimizer steps in an epoch.", lower_bound=1
)
VALIDATION_STEPS = flags.DEFINE_integer(
    "validation_steps", 5, "Batches of each validation.", lower_bound=1
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 2e-3, "Learning rate.", lower_bound=0.0
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and order.")
WEIGHTS_FILE = flags.DEFINE_string(
    "weights_file",
    "causal_lm.weights.h5",
    "Where to save the weights; keras_hub's own model loads them.",
)

flags.register_multi_flags_validator(
    ["width", "num_heads"],
    lambda values: values["width"] % values["num_heads"] == 0,
    "--width must be a multiple of --num_heads.",
)
flags.register_multi_flags_validator(
    ["num_heads", "num_key_value_heads"],
    lambda values: (
        values["num_heads"] % (values["num_key_value_heads"] or 1) == 0
    ),
    "--num_heads must be a multiple of --num_key_value_heads.",
)
flags.register_multi_flags_validator(
    ["num_heads", "model_parallel"],
    lambda values: values["num_heads"] % values["model_parallel"] == 0,
    "--num_heads must be a multiple of --model_parallel.",
)
flags.register_multi_flags_validator(
    ["batch_size", "num_replicas"],
    lambda values: values["batch_size"] % values["num_replicas"] == 0,
    "--batch_size must be a multiple of --num_replicas.",
)
flags.register_multi_flags_validator(
    ["layout", "family"],
    lambda values: values["layout"] == "auto" or values["family"] != "gpt2",
    "--layout=backbone needs a backbone with a layout map; gpt2 has none.",
)
flags.register_multi_flags_validator(
    ["family", "num_key_value_heads"],
    lambda values: (
        values["family"] != "gpt2" or values["num_key_value_heads"] is None
    ),
    "--num_key_value_heads is for llama and gemma.",
)
flags.register_validator(
    "hidden_width",
    lambda value: value % 2 == 0,
    "--hidden_width must be even.",
)
flags.register_validator(
    "weights_file",
    lambda value: value.endswith(".weights.h5"),
    "--weights_file must end in .weights.h5.",
)


def import_keras_hub():
    """keras_hub, which tfscale itself does not need."""
    try:
        import keras_hub
    except ImportError as error:
        raise app.UsageError(
            "This example needs keras_hub. Install it with "
            '`pip install "keras-hub>=0.26"`.'
        ) from error
    return keras_hub


def build_model(models):
    """A causal language model, with the same weights each time.

    Args:
        models: The module `keras_hub.models`.

    Returns:
        A `keras_hub.models.CausalLM` from token ids and a padding mask to
        logits of shape `(batch, sequence_length, texts.VOCABULARY)`.
    """
    keras.utils.set_random_seed(SEED.value)
    config = dict(
        vocabulary_size=texts.VOCABULARY,
        num_layers=NUM_LAYERS.value,
        hidden_dim=WIDTH.value,
        intermediate_dim=HIDDEN_WIDTH.value,
        dropout=DROPOUT.value,
    )
    if FAMILY.value == "gpt2":
        backbone = models.GPT2Backbone(
            num_heads=NUM_HEADS.value,
            max_sequence_length=SEQUENCE_LENGTH.value,
            **config,
        )
        return models.GPT2CausalLM(backbone, preprocessor=None)
    config["num_query_heads"] = NUM_HEADS.value
    config["num_key_value_heads"] = NUM_KEY_VALUE_HEADS.value or NUM_HEADS.value
    if FAMILY.value == "gemma":
        backbone = models.GemmaBackbone(
            head_dim=WIDTH.value // NUM_HEADS.value, **config
        )
        return models.GemmaCausalLM(preprocessor=None, backbone=backbone)
    backbone = models.LlamaBackbone(**config)
    return models.LlamaCausalLM(backbone, preprocessor=None)


def make_layout_map(models, mesh):
    """Which dims of which weights are divided over the model ranks."""
    # On a model that is thrown away, and on no accelerator.
    with keras.device("cpu:0"):
        model = build_model(models)
        if LAYOUT.value == "backbone":
            layout_map = model.backbone.get_layout_map(
                mesh, data_parallel_dim_name="data"
            )
        else:
            layout_map = tfscale.auto_layout_map(model, mesh)
    keras.utils.clear_session()
    return layout_map


def to_inputs(tokens, targets):
    """What a `CausalLM` takes; no window needs padding."""
    mask = tf.ones_like(tokens, tf.bool)
    return {"token_ids": tokens, "padding_mask": mask}, targets


def main(argv):
    del argv
    models = import_keras_hub().models
    mesh = meshes.make_mesh(data=NUM_REPLICAS.value, model=MODEL_PARALLEL.value)
    layout_map = None
    if MODEL_PARALLEL.value > 1:
        layout_map = make_layout_map(models, mesh)
    train, validation = texts.make_datasets(
        TEXT_FILES.value,
        SEQUENCE_LENGTH.value,
        BATCH_SIZE.value,
        SEED.value,
        parse=to_inputs,
    )
    with tfscale.MeshStrategy(mesh, layout_map).scope():
        model = build_model(models)
        if INITIAL_WEIGHTS.value:
            model.load_weights(INITIAL_WEIGHTS.value)
        model.compile(
            keras.optimizers.AdamW(LEARNING_RATE.value, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
    if MODEL_PARALLEL.value > 1:
        tfscale.sharding_summary(model)
    model.fit(
        train,
        validation_data=validation,
        epochs=NUM_EPOCHS.value,
        steps_per_epoch=STEPS_PER_EPOCH.value,
        validation_steps=VALIDATION_STEPS.value,
        shuffle=False,  # the datasets do that
        verbose=2,
    )
    model.save_weights(WEIGHTS_FILE.value)
    print(f"\nSaved {WEIGHTS_FILE.value}.")


if __name__ == "__main__":
    app.run(main)
