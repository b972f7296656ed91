"""Trains one configuration on logical devices of a GPU, as the driver says.

It prints what the first step took, then for each line that it reads, which is a
number of steps, what they took. "device" may be "CPU", to try it out.
"""

import json
import math
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt
from benchmarks.step_clock import StepClock

DEFAULTS = {
    "network": "gpt",  # or "resnet": ResNet-50 of images of `length` pixels
    "plain": False,  # Keras alone, on the whole chip
    "data": 1,
    "pipeline": 0,  # No pipeline; 1 is a pipeline of one stage.
    "model": 1,
    "zero_stage": 0,
    "offload": None,
    "sequence_parallel": False,
    "microbatches": 4,
    "schedule": "1f1b",
    "jit": False,
    "policy": "mixed_bfloat16",
    "device": "GPU",
    "memory": 24000,  # MiB of all logical devices
    "blocks": 12,
    "width": 1024,
    "heads": 16,
    "length": 512,
    "batch": 32,
}


def make_model(config):
    """The model of a configuration, compiled."""
    keras.config.set_dtype_policy(config["policy"])

    def build():
        keras.utils.set_random_seed(0)
        if config["network"] == "resnet":
            return keras.applications.ResNet50(
                weights=None,
                input_shape=(config["length"], config["length"], 3),
                classes=VOCABULARY,
                classifier_activation=None,
            )
        return build_gpt(
            *(config[k] for k in ("blocks", "width", "length", "heads"))
        )

    strategy = tf.distribute.get_strategy()
    if not config["plain"]:
        mesh = tfscale.device_mesh(
            data=config["data"],
            pipeline=max(config["pipeline"], 1),
            model=config["model"],
        )
        layouts = None
        if config["model"] > 1:
            layouts = tfscale.auto_layout_map(build, mesh)
        strategy = tfscale.MeshStrategy(
            mesh,
            layouts,
            zero_stage=config["zero_stage"],
            offload=config["offload"],
            sequence_parallel=config["sequence_parallel"],
        )
    with strategy.scope():
        model = build()
        if config["pipeline"]:
            model = tfscale.PipelineModel(
                model, config["microbatches"], schedule=config["schedule"]
            )
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=config["jit"],
        )
    return model


def make_batches(config):
    """The same random tokens, or images, in every step."""
    if config["network"] == "resnet":
        generator = np.random.default_rng(0)
        shape = (config["batch"], config["length"], config["length"], 3)
        images = generator.normal(size=shape).astype("float32")
        classes = generator.integers(VOCABULARY, size=config["batch"])
        return tf.data.Dataset.from_tensors((images, classes)).repeat()
    tokens = np.random.default_rng(0).integers(
        VOCABULARY, size=(config["batch"], config["length"] + 1)
    )
    tokens = tokens.astype("int32")
    return tf.data.Dataset.from_tensors(
        (tokens[:, :-1], tokens[:, 1:])
    ).repeat()


def main():
    config = {**DEFAULTS, **json.loads(sys.argv[1])}
    number = math.prod(max(config[k], 1) for k in ("data", "pipeline", "model"))
    if number > 1:
        limit = (
            config["memory"] // number if config["device"] == "GPU" else None
        )
        tfscale.use_virtual_devices(
            number, config["device"], memory_limit=limit
        )
    devices = [d.name for d in tf.config.list_logical_devices(config["device"])]
    keras.config.disable_interactive_logging()
    batches = make_batches(config)
    begin = time.perf_counter()
    model = make_model(config)
    history = model.fit(batches, steps_per_epoch=1, verbose=0)
    answer = {
        "first_step": time.perf_counter() - begin,
        "loss": history.history["loss"][0],
    }
    while True:
        if config["device"] == "GPU":
            memory = tf.config.experimental.get_memory_info
            answer["peaks"] = [memory(device)["peak"] for device in devices]
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        clock = StepClock()
        history = model.fit(
            batches, steps_per_epoch=int(line), verbose=0, callbacks=[clock]
        )
        # The mean over the steps of this turn.
        loss = history.history["loss"][0]
        answer = {"step": statistics.median(clock.times), "loss": loss}


if __name__ == "__main__":
    main()
