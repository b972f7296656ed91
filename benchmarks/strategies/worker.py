"""A process of one strategy; the first of them trains when it is told to.

A device is one core: one intra-op thread, and as many inter-op threads as the
process has devices.
"""

import contextlib
import json
import logging
import socket
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt
from tfscale.cluster import cluster_from_environment


class EpochClock(keras.callbacks.Callback):
    """Seconds of an epoch, whose end is that of its last step."""

    def on_epoch_begin(self, epoch, logs=None):
        """Notes when the epoch began."""
        del epoch, logs
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Notes how long it took."""
        del epoch, logs
        self.seconds = time.perf_counter() - self._begin


def make_strategy(config, build):
    """The strategy of a configuration, or None for plain Keras."""
    name = config["name"]
    if name == "plain":
        return None
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    if name == "central":
        return tf.distribute.experimental.CentralStorageStrategy(
            ["CPU:0", "CPU:1"], "CPU:0"
        )
    if name.startswith("servers"):
        return tfscale.ParameterServerStrategy()
    if name == "mesh_model":
        mesh = tfscale.device_mesh(model=2)
        return tfscale.MeshStrategy(mesh, tfscale.auto_layout_map(build, mesh))
    if name in ("mesh_pipeline", "coordinator"):
        return tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    return tfscale.MeshStrategy(
        tfscale.device_mesh(data=2), zero_stage=int(name == "mesh_zero")
    )


def make_model(config):
    """The compiled model of a configuration."""

    def build():
        keras.utils.set_random_seed(0)
        return build_gpt(config["blocks"], config["width"], config["length"])

    strategy = make_strategy(config, build)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        if config["name"] in ("mesh_pipeline", "coordinator"):
            model = tfscale.PipelineModel(model, num_microbatches=8)
        elif config["name"].startswith("servers"):
            model = tfscale.ParameterServerModel(model)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def make_batches(config):
    """The same batch without end."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(
        VOCABULARY, size=(config["batch"], config["length"] + 1)
    ).astype("int32")
    batches = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return batches.repeat().with_options(options)


def main():
    config = json.loads(sys.argv[1])
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(config["devices"])
    cluster = cluster_from_environment()
    if cluster is None:
        tfscale.use_virtual_devices(config["devices"])
    tfscale.initialize(coordinator=config["name"] == "coordinator")
    model = make_model(config)
    batches = make_batches(config)
    wires = None
    if cluster is None or cluster.is_chief:
        connection = socket.create_connection(("localhost", config["port"]))
        wires = connection.makefile("rw")
    for _ in range(config["rounds"]):
        if wires is not None and not wires.readline():
            return
        clock = EpochClock()
        model.fit(
            batches,
            steps_per_epoch=config["steps"],
            shuffle=False,
            verbose=0,
            callbacks=[clock],
        )
        if wires is not None:
            rows = config["steps"] * config["batch"]
            wires.write(f"{rows / clock.seconds}\n")
            wires.flush()


if __name__ == "__main__":
    main()
