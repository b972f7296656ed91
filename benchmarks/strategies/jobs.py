"""A GPT, its batches, and every strategy that a machine of two cores can run.

A device is one core: one intra-op thread, and as many inter-op threads as the
process has devices.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfscale
from benchmarks.pipeline.worker import VOCABULARY
from benchmarks.pipeline.worker import build_gpt

_ON_TWO_WORKERS = ("--num_workers=2",)
LAUNCH = {
    "workers": _ON_TWO_WORKERS,
    "coordinator": _ON_TWO_WORKERS,
    "servers_1": ("--num_workers=1", "--num_ps=1"),
    "servers_2": ("--num_workers=2", "--num_ps=1"),
}


def _build_model(blocks, width, length):
    keras.utils.set_random_seed(0)
    model = build_gpt(blocks, width, length)
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _dataset(batch, length):
    generator = np.random.default_rng(0)
    tokens = generator.integers(VOCABULARY, size=(batch, length + 1))
    tokens = tokens.astype("int32")
    return tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))


def _cores(num_devices):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    tfscale.use_virtual_devices(num_devices)


def one_device():
    """One core for one device."""
    _cores(1)


def _of_one_device():
    _cores(1)
    return tf.distribute.OneDeviceStrategy("/cpu:0")


def _mirrored():
    _cores(2)
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def _central():
    _cores(2)
    return tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
    )


def _replicas(zero_stage=0):
    _cores(2)
    return tfscale.MeshStrategy(
        tfscale.device_mesh(data=2), zero_stage=zero_stage
    )


def _model_ranks(build_model):
    _cores(2)
    mesh = tfscale.device_mesh(model=2)
    layout_map = tfscale.auto_layout_map(build_model, mesh)
    return tfscale.MeshStrategy(mesh, layout_map)


def _pipelined():
    strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
    return strategy, functools.partial(
        tfscale.PipelineModel, num_microbatches=8
    )


def _stages():
    _cores(2)
    return _pipelined()


def _workers():
    _cores(1)
    tfscale.initialize()
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


def _coordinator():
    _cores(1)
    tfscale.initialize(coordinator=True)
    return _pipelined()


def _servers():
    _cores(1)
    tfscale.initialize()
    return tfscale.ParameterServerStrategy(), tfscale.ParameterServerModel


def jobs(blocks, width, length, batch):
    """`build_model`, `dataset` and `strategies` of a GPT of this size."""
    build_model = functools.partial(_build_model, blocks, width, length)
    return (
        build_model,
        functools.partial(_dataset, batch, length),
        {
            "one_device": _of_one_device,
            "mirrored": _mirrored,
            "central": _central,
            "mesh_data": _replicas,
            "mesh_zero": functools.partial(_replicas, zero_stage=1),
            "mesh_model": functools.partial(_model_ranks, build_model),
            "mesh_pipeline": _stages,
            "workers": _workers,
            "coordinator": _coordinator,
            "servers_1": _servers,
            "servers_2": _servers,
        },
    )
