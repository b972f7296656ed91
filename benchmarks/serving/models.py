"""What is served: a GPT and an MLP, each on a mesh."""

import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt

WIDTH = 1024
INPUTS = 256
LAYERS = 8


def one_core_each(num_devices):
    """Sets TensorFlow up: a device is one core."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    tfscale.use_virtual_devices(num_devices)


def scope_of(axes):
    """The scope of a mesh, or of one device without axes."""
    if not axes:
        return contextlib.nullcontext()
    mesh = tfscale.device_mesh(**axes)
    layout_map = None
    if axes.get("model", 1) > 1:
        layout_map = keras.distribution.LayoutMap(mesh)
        for number in range(0, LAYERS, 2):
            layout_map[f".*dense_{number}/kernel"] = (None, "model")
            layout_map[f".*dense_{number}/bias"] = ("model",)
            layout_map[f".*dense_{number + 1}/kernel"] = ("model", None)
    return tfscale.MeshStrategy(mesh, layout_map).scope()


def make(kind, axes, num_microbatches=1):
    """A model for `predict`: "gpt", "mlp" or "int8", and rows of its input."""
    keras.utils.set_random_seed(0)
    with scope_of(axes):
        if kind == "gpt":
            model = build_gpt(6, 256, 64)
            rows = np.random.randint(0, VOCABULARY, (2048, 64))
        else:
            layers = [
                keras.layers.Dense(WIDTH, "relu", name=f"dense_{number}")
                for number in range(LAYERS)
            ]
            inputs = keras.Input((INPUTS,), name="x")
            model = keras.Sequential([inputs, *layers])
            rows = np.random.normal(size=(2048, INPUTS)).astype("float32")
        if kind == "int8":
            model.quantize("int8")
        if axes.get("pipeline", 1) > 1:
            model = tfscale.PipelineModel(model, num_microbatches)
        model.compile()
    return model, rows


def export(path, axes):
    """Writes the MLP, in a process of its own: `tfscale.export` of a mesh."""
    one_core_each(2)
    model, _ = make("mlp", axes)
    tfscale.export(model, path)


if __name__ == "__main__":
    export(
        sys.argv[1],
        {
            name: int(size)
            for name, size in (axis.split("=") for axis in sys.argv[2:])
        },
    )
