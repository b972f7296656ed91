"""Which devices there are, and how they are laid out along named axes."""

import math

import keras
import numpy as np
import tensorflow as tf

AXES = ("data", "pipeline", "model")


def use_virtual_devices(
    num_devices: int,
    device_type: str = "CPU",
    *,
    memory_limit: int | None = None,
) -> None:
    """Splits the first physical device into several logical ones.

    It is how anything here is tried on a machine without accelerators, or
    with one. To be called before TensorFlow starts its devices, that is before
    the first tensor, variable or list of logical devices.

    Args:
        num_devices: Number of logical devices to make.
        device_type: `"CPU"` or `"GPU"`.
        memory_limit: Memory of each logical device in MiB. TensorFlow needs
            it to split a GPU, and knows no such limit for a CPU.

    Raises:
        TypeError: If `num_devices` is no integer.
        ValueError: If `num_devices` is less than 1, there is no physical
            device of that type, or `memory_limit` is missing for a GPU or
            given for a CPU.
        RuntimeError: If TensorFlow has started its devices already, and not
            with this number of them.

    Example:

    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    """
    _check_sizes(num_devices=num_devices)
    if num_devices < 1:
        raise ValueError(
            "`num_devices` must be at least 1. Received: "
            f"num_devices={num_devices}."
        )
    if (device_type == "GPU" and num_devices > 1) == (memory_limit is None):
        raise ValueError(
            "`memory_limit` must be given to split a GPU, and for nothing "
            f"else. Received: num_devices={num_devices}, "
            f"device_type={device_type!r}, memory_limit={memory_limit}."
        )
    physical = tf.config.list_physical_devices(device_type)
    if not physical:
        types = {d.device_type for d in tf.config.list_physical_devices()}
        raise ValueError(
            "Virtual devices are parts of a physical device of their type. "
            f"Received: device_type={device_type!r}, but this machine has "
            f"only {', '.join(sorted(types))}."
        )
    one = tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit)
    try:
        tf.config.set_logical_device_configuration(
            physical[0], [one] * num_devices
        )
    except RuntimeError as error:
        started = len(tf.config.list_logical_devices(device_type))
        if started != num_devices:
            raise RuntimeError(
                "`use_virtual_devices` must come before TensorFlow starts its "
                "devices (with the first tensor, variable or list of logical "
                f"devices). Received: num_devices={num_devices}, but "
                f"TensorFlow runs with {started} {device_type} devices "
                "already. Call it first thing after the imports."
            ) from error


def device_mesh(
    *,
    data: int = 1,
    pipeline: int = 1,
    model: int = 1,
    devices: list[str] | None = None,
) -> keras.distribution.DeviceMesh:
    """Lays devices out as data replicas x pipeline stages x model ranks.

    Neighbours along the last axes are neighbours in `devices`, because they
    talk most: model ranks in every layer, stages once per microbatch,
    replicas once per step.

    Args:
        data: Number of replicas of the model.
        pipeline: Number of devices that the layers of a replica are cut
            over.
        model: Number of devices that each layer is split over.
        devices: Device names like `"GPU:3"` or
            `"/job:worker/task:1/device:GPU:0"`, as many as the axes need.
            Defaults to the first logical accelerators, or CPUs where there
            is no accelerator.

    Returns:
        A `keras.distribution.DeviceMesh` of shape `(data, pipeline, model)`
        with the axes `"data"`, `"pipeline"` and `"model"`.

    Raises:
        TypeError: If the size of an axis is no integer, or `devices` no names.
        ValueError: If an axis is smaller than 1, a device is named twice, or
            there are not as many devices as the axes need.

    Example:

    >>> import tfscale
    >>> mesh = tfscale.device_mesh(data=2, pipeline=4)
    >>> mesh.shape
    (2, 4, 1)
    """
    shape = _check_sizes(data=data, pipeline=pipeline, model=model)
    if min(shape) < 1:
        raise ValueError(
            "Every axis of a mesh must be at least 1. Received: "
            f"data={data}, pipeline={pipeline}, model={model}."
        )
    needed = math.prod(shape)
    if devices is None:
        devices = _default_devices(needed, shape)
    elif isinstance(devices, str) or not all(
        isinstance(name, str) for name in devices
    ):
        raise TypeError(
            "`devices` must be a list of names of devices. Received: "
            f"devices={devices!r}. Of what `tf.config.list_logical_devices` "
            "returns, take the `name`s."
        )
    elif len(devices) != needed or len(set(devices)) != needed:
        raise ValueError(
            "A mesh needs as many different devices as the product of its "
            f"axes. Received: data={data}, pipeline={pipeline}, "
            f"model={model}, that is {needed}, and devices={devices}."
        )
    return keras.distribution.DeviceMesh(
        shape=shape, axis_names=AXES, devices=np.array(devices)
    )


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            whole = isinstance(size, float) and size.is_integer()
            fix = f" Use {name}={int(size)}." if whole else ""
            raise TypeError(
                f"`{name}` must be an integer. Received: {name}={size!r}.{fix}"
            )
    return tuple(map(int, sizes.values()))


def _default_devices(needed, shape):
    logical = tf.config.list_logical_devices()
    accelerators = [d.name for d in logical if d.device_type in ("GPU", "TPU")]
    found = accelerators or [d.name for d in logical if d.device_type == "CPU"]
    if len(found) < needed:
        kind = "accelerators" if accelerators else "CPU devices"
        fix = (
            "Make the mesh smaller."
            if accelerators
            else "Make the mesh smaller, or call "
            f"`tfscale.use_virtual_devices({needed})` before anything else."
        )
        raise ValueError(
            "A mesh needs as many devices as the product of its axes. "
            f"Received: a mesh of {' x '.join(map(str, shape))} = {needed}, "
            f"but there are {len(found)} {kind}. {fix}"
        )
    return found[:needed]
