"""The devices of an example: accelerators or, without any, virtual ones."""

import tensorflow as tf

import tfscale
from tfscale.cluster import cluster_from_environment

# What `tfscale.PipelineModel` takes as its `schedule`.
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb1p",
    "zb_v",
    "dualpipev",
    "auto",
)


def make_mesh(*, data=1, pipeline=1, model=1):
    """A mesh over all accelerators or, without any, over virtual CPU devices.

    In a cluster, which was joined, over those of all processes; the launcher's
    `--devices_per_worker` says how many virtual ones each of them has.

    Args:
        data: Integer, number of replicas.
        pipeline: Integer, number of stages. None for as many as the devices
            give, or 2 where there are no accelerators and no cluster.
        model: Integer, number of model ranks.

    Returns:
        A `keras.distribution.DeviceMesh`.
    """
    is_cluster = cluster_from_environment() is not None
    list_devices = (
        tf.config.list_logical_devices
        if is_cluster
        else tf.config.list_physical_devices
    )
    devices = list_devices("GPU") + list_devices("TPU")
    if is_cluster:
        devices = devices or list_devices("CPU")
    if devices:
        pipeline = pipeline or max(len(devices) // (data * model), 1)
    else:
        pipeline = pipeline or 2
        num_devices = data * pipeline * model
        # One core is one device.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(num_devices)
        tfscale.use_virtual_devices(num_devices)
    return tfscale.device_mesh(data=data, pipeline=pipeline, model=model)
