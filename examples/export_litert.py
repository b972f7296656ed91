"""Exports a model that was trained on any mesh to LiteRT, for small devices.

    python -m examples.export_litert --flagfile=configs/export_litert.flags

Three files: float, dynamic int8 (int8 weights) and full int8 (activations too,
by ranges of representative rows). The converter quantizes: a model that Keras
has quantized cannot be converted. Layers of few weights stay float.
"""

import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

from examples import mlp

flags.adopt_module_key_flags(mlp)

FOLDER = flags.DEFINE_string("folder", "litert", "Where the files are written.")
WIDTH = flags.DEFINE_integer("width", 256, "Neurons of a layer.", lower_bound=8)


def run(path, x):
    """What a file returns for rows, however many."""
    with warnings.catch_warnings():
        # It says that it moves to the package ai_edge_litert.
        warnings.simplefilter("ignore", UserWarning)
        interpreter = tf.lite.Interpreter(path, num_threads=1)
    index = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(index, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(index, x)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)  # TensorFlow tells of each file
    strategy = mlp.make_strategy()
    keras.utils.set_random_seed(mlp.SEED.value)
    x, y = mlp.clusters(mlp.NUM_ROWS.value, mlp.SEED.value)
    test, _ = mlp.clusters(50, mlp.SEED.value + 1)

    def build():
        return mlp.build(WIDTH.value)

    with strategy.scope():
        model = build()
    mlp.train(strategy, model, x, y)
    plain = mlp.plain_copy(model, build)  # for one device, out of any shards
    expected = plain.predict(test, verbose=0)

    def representative():
        for row in x[:100]:
            yield [row[None]]

    quantized = {"optimizations": [tf.lite.Optimize.DEFAULT]}
    kinds = {
        "float": {},
        "dynamic_int8": quantized,
        "full_int8": {**quantized, "representative_dataset": representative},
    }
    os.makedirs(FOLDER.value, exist_ok=True)
    for kind, options in kinds.items():
        path = os.path.join(FOLDER.value, f"{kind}.tflite")
        plain.export(path, format="litert", verbose=False, **options)
        error = np.abs(run(path, test) - expected).max()
        error /= np.abs(expected).max()
        print(f"{kind}: {os.path.getsize(path)} bytes, error {error:.1e}")


if __name__ == "__main__":
    app.run(main)
