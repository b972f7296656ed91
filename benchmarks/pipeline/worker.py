"""Trains one configuration in a process of its own, as the driver says.

A device is one core: one intra-op thread, and as many inter-op threads as
there are devices. These are options of a process, hence one per configuration.
"""

import json
import resource
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.step_clock import StepClock

VOCABULARY = 256


def build_gpt(blocks, width, length, heads=4):
    """A decoder of pre-norm blocks, with nothing but Keras layers."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads)(
            y, y, use_causal_mask=True
        )
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


def make_model(config):
    """The model of a configuration, compiled: plain, or as a pipeline."""

    def build():
        keras.utils.set_random_seed(0)
        return build_gpt(config["blocks"], config["width"], config["length"])

    def compile_(model):
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    if not config["stages"]:
        return compile_(build())
    mesh = tfscale.device_mesh(pipeline=config["stages"])
    strategy = tfscale.MeshStrategy(mesh)
    with strategy.scope():
        return compile_(
            tfscale.PipelineModel(
                build(),
                num_microbatches=config["microbatches"],
                schedule=config["schedule"],
                recompute=config.get("recompute", False),
            )
        )


def main():
    config = json.loads(sys.argv[1])
    devices = max(config["stages"], 1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(devices)
    tfscale.use_virtual_devices(devices)
    keras.config.disable_interactive_logging()
    generator = np.random.default_rng(0)
    tokens = generator.integers(
        VOCABULARY, size=(config["batch"], config["length"] + 1)
    ).astype("int32")
    batches = tf.data.Dataset.from_tensors(
        (tokens[:, :-1], tokens[:, 1:])
    ).repeat()

    begin, processor = time.perf_counter(), time.process_time()
    model = make_model(config)
    history = model.fit(batches, steps_per_epoch=1, verbose=0)
    answer = {
        "first_step": time.perf_counter() - begin,
        "first_processor": time.process_time() - processor,
        "loss": history.history["loss"][0],
    }
    while True:
        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        clock = StepClock()
        model.fit(
            batches, steps_per_epoch=int(line), verbose=0, callbacks=[clock]
        )
        answer = {"step": statistics.median(clock.times)}


if __name__ == "__main__":
    main()
