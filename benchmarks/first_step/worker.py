"""The first step of a GPT on a mesh, as the driver says."""

import json
import math
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt


def main():
    config = json.loads(sys.argv[1])
    tfscale.use_virtual_devices(math.prod(config["mesh"].values()))
    keras.config.disable_interactive_logging()

    def build():
        keras.utils.set_random_seed(0)
        return build_gpt(config["blocks"], config["width"], config["length"])

    mesh = tfscale.device_mesh(**config["mesh"])
    layouts = None
    if config["mesh"].get("model", 1) > 1:
        layouts = tfscale.auto_layout_map(build, mesh)
    with tfscale.MeshStrategy(mesh, layouts).scope():
        model = build()
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=config["jit_compile"],
        )
    shape = config["batch"], config["length"] + 1
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=shape)
    tokens = tokens.astype("int32")
    batches = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    begin = time.perf_counter()
    history = model.fit(batches, verbose=0)
    seconds = time.perf_counter() - begin
    loss = history.history["loss"][0]
    print(json.dumps({"first_step": seconds, "loss": loss}))


if __name__ == "__main__":
    main()
