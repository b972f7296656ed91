"""A small classifier on any mesh, and clusters for it to learn."""

import keras
import numpy as np
from absl import flags

import tfscale
from examples import meshes

NUM_CLASSES = 4
NUM_FEATURES = 32

NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas", 1, "Copies of the model.", lower_bound=1
)
NUM_STAGES = flags.DEFINE_integer(
    "num_stages", 1, "Pipeline stages.", lower_bound=1
)
NUM_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches",
    4,
    "Microbatches of a step in a pipeline.",
    lower_bound=1,
)
MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel",
    1,
    "Devices that each layer is split over.",
    lower_bound=1,
)
NUM_ROWS = flags.DEFINE_integer(
    "num_rows", 2048, "Rows to learn from.", lower_bound=64
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 4, "Epochs of each training.", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Rows of a batch.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and data.")


def clusters(num_rows, seed):
    """Rows around a center for each class, and their labels."""
    centers = np.random.default_rng(0).normal(size=(NUM_CLASSES, NUM_FEATURES))
    generator = np.random.default_rng(seed + 1)
    labels = generator.integers(NUM_CLASSES, size=num_rows)
    noise = generator.normal(size=(num_rows, NUM_FEATURES))
    return (centers[labels] + noise).astype("float32"), labels


def build(width, num_layers=2, name="mlp", dropout=0.0):
    """Hidden layers "NAME_d0", "NAME_d1", ..., and logits."""
    hidden = []
    for index in range(num_layers):
        hidden.append(
            keras.layers.Dense(width, "relu", name=f"{name}_d{index}")
        )
        if dropout:
            hidden.append(keras.layers.Dropout(dropout))
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            *hidden,
            keras.layers.Dense(NUM_CLASSES, name=f"{name}_logits"),
        ],
        name=name,
    )


def make_strategy():
    """Over the mesh of the flags; layers in turn by columns and rows."""
    mesh = meshes.make_mesh(
        data=NUM_REPLICAS.value,
        pipeline=NUM_STAGES.value,
        model=MODEL_PARALLEL.value,
    )
    layout_map = None
    if MODEL_PARALLEL.value > 1:
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*d[02468]/kernel"] = (None, "model")
        layout_map[".*d[02468]/bias"] = ("model",)
        layout_map[".*d[13579]/kernel"] = ("model", None)
    return tfscale.MeshStrategy(mesh, layout_map)


def in_stages(model, **options):
    """The model as a pipeline, if the flags ask for stages."""
    if NUM_STAGES.value == 1:
        return model
    return tfscale.PipelineModel(model, NUM_MICROBATCHES.value, **options)


def hard_loss():
    """Of logits and labels."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(strategy, model, x, y, epochs=None, compiled=None):
    """Trains a model on the mesh; returns what was fitted."""
    with strategy.scope():
        wrapped = in_stages(model)
        wrapped.compile(
            keras.optimizers.Adam(0.003),
            **(compiled or {"loss": hard_loss()}),
        )
    wrapped.fit(
        x,
        y,
        batch_size=BATCH_SIZE.value,
        epochs=epochs or NUM_EPOCHS.value,
        verbose=0,
    )
    return wrapped


def predict(strategy, model, x):
    """The logits of a model on the mesh."""
    with strategy.scope():
        wrapped = in_stages(model)
    return wrapped.predict(x, batch_size=256, verbose=0)


def accuracy(strategy, model, x, labels):
    """Of a model that returns logits."""
    logits = predict(strategy, model, x)
    return float(np.mean(np.argmax(logits, -1) == labels))


def plain_copy(model, build_plain):
    """The weights of a model on a mesh in a new one on no mesh."""
    plain = build_plain()
    plain.set_weights([keras.ops.convert_to_numpy(v) for v in model.weights])
    return plain
