"""The first step of a model on a mesh, or on one device, as the driver says."""

import contextlib
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

_LATER_STEPS = 20


def gpt(config):
    """What builds a GPT, and a batch of tokens."""

    def build():
        keras.utils.set_random_seed(0)
        return build_gpt(config["blocks"], config["width"], config["length"])

    shape = config["batch"], config["length"] + 1
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=shape)
    tokens = tokens.astype("int32")
    return build, (tokens[:, :-1], tokens[:, 1:])


def resnet50(config):
    """What builds a ResNet-50, and a batch of 8 images of 64 x 64."""
    del config

    def build():
        keras.utils.set_random_seed(0)
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(64, 64, 3),
            classes=10,
            classifier_activation=None,
        )

    random = np.random.default_rng(0)
    images = random.normal(size=(8, 64, 64, 3)).astype("float32")
    return build, (images, random.integers(10, size=8))


def scope_of(config, build):
    """The scope of the strategy; nothing's for one device."""
    if config["mesh"] is None:
        return contextlib.nullcontext()
    mesh = tfscale.device_mesh(**config["mesh"])
    layouts = None
    if config["mesh"].get("model", 1) > 1:
        layouts = tfscale.auto_layout_map(build, mesh)
    return tfscale.MeshStrategy(mesh, layouts).scope()


def main():
    config = json.loads(sys.argv[1])
    if config["mesh"] is not None:
        tfscale.use_virtual_devices(math.prod(config["mesh"].values()))
    keras.config.disable_interactive_logging()
    build, batch = {"gpt": gpt, "resnet50": resnet50}[config["model"]](config)
    with scope_of(config, build):
        model = build()
        if config["one_stage"]:
            model = tfscale.PipelineModel(model, num_microbatches=1)
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=config["jit_compile"],
        )
    batches = tf.data.Dataset.from_tensors(batch)
    begin, processors = time.perf_counter(), time.process_time()
    history = model.fit(batches, verbose=0)
    found = {
        "first_step": time.perf_counter() - begin,
        "processors": time.process_time() - processors,
        "loss": history.history["loss"][0],
    }
    begin = time.perf_counter()
    model.fit(batches.repeat(_LATER_STEPS), verbose=0)
    found["step"] = (time.perf_counter() - begin) / _LATER_STEPS
    print(json.dumps(found))


if __name__ == "__main__":
    main()
