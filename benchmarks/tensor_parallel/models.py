"""What is trained, and how it is sharded: Keras alone, on any backend."""

import keras
import numpy as np

VOCABULARY = 256

# By model: patterns of `keras.distribution.LayoutMap`, Megatron-LM's columns
# and rows. Every system that takes a layout map is given these.
LAYOUTS = {
    "mlp": {
        "up_./kernel": (None, "model"),
        "up_./bias": ("model",),
        "down_./kernel": ("model", None),
    },
    "gpt": {
        "tokens/embeddings": ("model", None),
        "attention_./(query|key|value)/kernel": (None, "model", None),
        "attention_./(query|key|value)/bias": ("model", None),
        "attention_./attention_output/kernel": ("model", None, None),
        "up_./kernel": (None, "model"),
        "up_./bias": ("model",),
        "down_./kernel": ("model", None),
        "logits/kernel": (None, "model"),
        "logits/bias": ("model",),
    },
}


def build_mlp(pairs=6, width=512, hidden=2048):
    """Pairs of Dense layers, from `width` to `hidden` and back."""
    x = inputs = keras.Input((width,))
    for index in range(pairs):
        x = keras.layers.Dense(hidden, activation="relu", name=f"up_{index}")(x)
        x = keras.layers.Dense(width, name=f"down_{index}")(x)
    return keras.Model(inputs, x)


def build_gpt(blocks=8, width=256, length=64, heads=4):
    """The decoder of the pipeline's benchmark, with names for its layers."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width, name="tokens")(tokens)
    for i in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(
            heads, width // heads, name=f"attention_{i}"
        )(y, y, use_causal_mask=True)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(y)
        y = keras.layers.Dense(width, name=f"down_{i}")(y)
        x = keras.layers.Add()([x, y])
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dense(VOCABULARY, name="logits")(x)
    return keras.Model(tokens, x)


def compiled(name):
    """A model of `LAYOUTS`, with the same weights each time."""
    keras.utils.set_random_seed(0)
    if name == "mlp":
        model = build_mlp()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    else:
        model = build_gpt()
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def batch(name):
    """Inputs and targets of one step, as arrays."""
    generator = np.random.default_rng(0)
    if name == "mlp":
        x, y = generator.standard_normal((2, 1024, 512)).astype("float32")
        return x, y
    tokens = generator.integers(VOCABULARY, size=(32, 65)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def layout_map(name, mesh):
    """The `LayoutMap` of a model."""
    layouts = keras.distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS[name].items():
        layouts[pattern] = axes
    return layouts
