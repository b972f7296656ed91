"""The devices of an example: accelerators or, without any, virtual ones."""

import tensorflow as tf

import tfscale


def make_mesh(*, data=1, pipeline=1, model=1):
    """A mesh over all accelerators or, without any, over virtual CPU devices.

    Args:
        data: Integer, number of replicas.
        pipeline: Integer, number of stages. None for as many as the
            accelerators give, or 2 where there are none.
        model: Integer, number of model ranks.

    Returns:
        A `keras.distribution.DeviceMesh`.
    """
    accelerators = tf.config.list_physical_devices("GPU")
    accelerators += tf.config.list_physical_devices("TPU")
    if accelerators:
        pipeline = pipeline or max(len(accelerators) // (data * model), 1)
    else:
        pipeline = pipeline or 2
        num_devices = data * pipeline * model
        # One core is one device.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(num_devices)
        tfscale.use_virtual_devices(num_devices)
    return tfscale.device_mesh(data=data, pipeline=pipeline, model=model)
