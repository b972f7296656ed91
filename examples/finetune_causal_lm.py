"""Splits a causal language model of keras_hub over devices and trains it on.

    python -m examples.finetune_causal_lm \
        --flagfile=configs/finetune_causal_lm.flags

The model is keras_hub's, unmodified, of the sizes that the flags say and with
random weights or those of `--initial_weights`; nothing is downloaded. A token
is a byte of the Python standard library's source. Without accelerators, virtual
CPU devices of one core each take their place.
"""

import os

# Before TensorFlow is imported: it has notes on how it was built. To see them,
# set another level (0 is all).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tfscale
from examples import hub
from examples import meshes
from examples import texts
from examples import training_flags as shared

flags.adopt_module_key_flags(shared)

FAMILY = flags.DEFINE_enum(
    "family", "llama", ["llama", "gpt2", "gemma"], "Whose architecture."
)
NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", 4, "Number of transformer layers.", lower_bound=1
)
HIDDEN_WIDTH = flags.DEFINE_integer(
    "hidden_width", 384, "Hidden units of each MLP; even.", lower_bound=2
)
NUM_KEY_VALUE_HEADS = flags.DEFINE_integer(
    "num_key_value_heads",
    None,
    "Heads of keys and values, fewer than --num_heads for grouped queries; "
    "gpt2 has no such thing. By default --num_heads.",
    lower_bound=1,
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
    "Who says how weights are sharded: tfscale.auto_layout_map, or the "
    "backbone's own get_layout_map (llama, gemma).",
)
WEIGHTS_FILE = flags.DEFINE_string(
    "weights_file",
    "causal_lm.weights.h5",
    "Where to save the weights; keras_hub's own model loads them.",
)

flags.register_multi_flags_validator(
    ["num_heads", "num_key_value_heads"],
    lambda values: (
        values["num_heads"] % (values["num_key_value_heads"] or 1) == 0
    ),
    "--num_heads must be a multiple of --num_key_value_heads.",
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


def build_model(models):
    """A causal language model, with the same weights each time.

    Args:
        models: The module `keras_hub.models`.

    Returns:
        A `keras_hub.models.CausalLM` from token ids and a padding mask to
        logits of shape `(batch, sequence_length, texts.VOCABULARY)`.
    """
    keras.utils.set_random_seed(shared.SEED.value)
    config = dict(
        vocabulary_size=texts.VOCABULARY,
        num_layers=NUM_LAYERS.value,
        hidden_dim=shared.WIDTH.value,
        intermediate_dim=HIDDEN_WIDTH.value,
        dropout=shared.DROPOUT.value,
    )
    if FAMILY.value == "gpt2":
        backbone = models.GPT2Backbone(
            num_heads=shared.NUM_HEADS.value,
            max_sequence_length=shared.SEQUENCE_LENGTH.value,
            **config,
        )
        return models.GPT2CausalLM(backbone, preprocessor=None)
    config["num_query_heads"] = shared.NUM_HEADS.value
    config["num_key_value_heads"] = (
        NUM_KEY_VALUE_HEADS.value or shared.NUM_HEADS.value
    )
    if FAMILY.value == "gemma":
        backbone = models.GemmaBackbone(
            head_dim=shared.WIDTH.value // shared.NUM_HEADS.value, **config
        )
        return models.GemmaCausalLM(preprocessor=None, backbone=backbone)
    backbone = models.LlamaBackbone(**config)
    return models.LlamaCausalLM(backbone, preprocessor=None)


def make_layout_map(models, mesh):
    """Which dims of which weights are sharded over the model ranks."""
    if LAYOUT.value == "auto":
        return tfscale.auto_layout_map(lambda: build_model(models), mesh)
    kinds = {"llama": models.LlamaBackbone, "gemma": models.GemmaBackbone}
    return kinds[FAMILY.value].get_layout_map(
        mesh, data_parallel_dim_name="data"
    )


def to_inputs(tokens, targets):
    """What a `CausalLM` takes; no window needs padding."""
    mask = tf.ones_like(tokens, tf.bool)
    return {"token_ids": tokens, "padding_mask": mask}, targets


def main(argv):
    del argv
    models = hub.models()
    mesh = meshes.make_mesh(
        data=shared.NUM_REPLICAS.value, model=shared.MODEL_PARALLEL.value
    )
    layout_map = None
    if shared.MODEL_PARALLEL.value > 1:
        layout_map = make_layout_map(models, mesh)
    train, validation = texts.make_datasets(
        shared.TEXT_FILES.value,
        shared.SEQUENCE_LENGTH.value,
        shared.BATCH_SIZE.value,
        shared.SEED.value,
        parse=to_inputs,
    )
    strategy = tfscale.MeshStrategy(
        mesh, layout_map, zero_stage=shared.ZERO_STAGE.value
    )
    with strategy.scope():
        model = build_model(models)
        if INITIAL_WEIGHTS.value:
            model.load_weights(INITIAL_WEIGHTS.value)
        model.compile(
            keras.optimizers.AdamW(
                shared.LEARNING_RATE.value, global_clipnorm=1.0
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
    if shared.MODEL_PARALLEL.value > 1:
        tfscale.sharding_summary(model)
    model.fit(
        train,
        validation_data=validation,
        epochs=shared.NUM_EPOCHS.value,
        steps_per_epoch=shared.STEPS_PER_EPOCH.value,
        validation_steps=shared.VALIDATION_STEPS.value,
        shuffle=False,  # the datasets do that
        verbose=2,
    )
    model.save_weights(WEIGHTS_FILE.value)
    print(f"\nSaved {WEIGHTS_FILE.value}.")


if __name__ == "__main__":
    app.run(main)
