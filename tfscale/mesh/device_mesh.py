"""How devices are laid out along named axes."""

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfscale.cluster.initialize import coordinated
from tfscale.cluster.initialize import joined
from tfscale.collectives.workers import workers
from tfscale.integers import check_integer
from tfscale.mesh.speeds import MeshWithSpeeds
from tfscale.mesh.speeds import check_axes
from tfscale.mesh.speeds import given_speeds
from tfscale.mesh.speeds import measured_seconds
from tfscale.mesh.speeds import speeds_by

AXES = ("data", "pipeline", "model")


def device_mesh(
    *,
    data: int = 1,
    pipeline: int = 1,
    model: int = 1,
    devices: list[str] | None = None,
    speeds: Sequence[float] | str | None = None,
) -> keras.distribution.DeviceMesh:
    """Lays devices out as data replicas x pipeline stages x model ranks.

    Neighbors along the last axes are neighbors in `devices`, because they
    communicate most: model ranks in every layer, stages once per microbatch,
    replicas once per step.

    Args:
        data: Number of replicas of the model.
        pipeline: Number of devices that the layers of a replica are cut
            over.
        model: Number of devices that each layer is split over.
        devices: Device names like `"GPU:3"` or
            `"/job:worker/task:1/device:GPU:0"`, as many as the axes need.
            Defaults to the first logical accelerators, or CPUs without any;
            after `tfscale.initialize` to as many of each process, one process
            after the other.
        speeds: How fast each device is, for devices that differ: numbers
            above 0 in the order of `devices`; only ratios count.
            With `[1, 2]` and `data=2` the second replica gets two of three
            rows of each batch; with `pipeline=2` the second stage gets two
            thirds of the work. `"measure"` times a matrix product on each
            device, one after the other, which takes seconds; each worker
            times its devices. Only one axis, `data` or `pipeline`, may then
            have several devices. Default: all are equally fast.

    Returns:
        A `keras.distribution.DeviceMesh` of shape `(data, pipeline, model)`
        with the axes `"data"`, `"pipeline"` and `"model"`. If `speeds` were
        given, it has the numbers as its attribute `speeds`, a tuple.

    Raises:
        TypeError: If the size of an axis is no integer, `devices` no names, or
            `speeds` no numbers.
        ValueError: If an axis is smaller than 1, a device is named twice,
            there are not as many devices as the axes need, or `speeds` are not
            as many numbers, or not above 0, or for several axes.

    Example:

    >>> import tfscale
    >>> mesh = tfscale.device_mesh(data=2, pipeline=4)
    >>> mesh.shape
    (2, 4, 1)
    >>> tfscale.device_mesh(data=2, speeds=[1, 2]).speeds
    (1.0, 2.0)
    """
    sizes = {"data": data, "pipeline": pipeline, "model": model}
    shape = tuple(check_integer(*size) for size in sizes.items())
    needed = math.prod(shape)
    is_measured = isinstance(speeds, str) and speeds == "measure"
    given: Sequence[float] = ()
    if speeds is not None:
        if not is_measured:
            given = given_speeds(speeds, sizes)
        check_axes(speeds, sizes)
    if devices is None:
        devices = _default_devices(needed, shape)
    elif isinstance(devices, str) or not all(
        isinstance(name, str) for name in devices
    ):
        raise TypeError(
            "`devices` must be a list of names of devices. Received: "
            f"devices={devices!r}. Use the `name`s that "
            "`tf.config.list_logical_devices` returns."
        )
    elif len(devices) != needed or len(set(devices)) != needed:
        raise ValueError(
            "A mesh needs as many different devices as the product of its "
            f"axes. Received: data={data}, pipeline={pipeline}, "
            f"model={model}, that is {needed}, and devices={devices}."
        )
    if speeds is None:
        return keras.distribution.DeviceMesh(
            shape=shape, axis_names=AXES, devices=np.array(devices)
        )
    return MeshWithSpeeds(
        shape, AXES, np.array(devices), given or _measured(devices)
    )


def _measured(devices):
    """Speeds by a product on each device; each worker measures its devices."""
    found = workers()
    if found is None:
        return speeds_by(measured_seconds(devices))
    each = len(devices) // found.count
    begin = found.index * each
    seconds = measured_seconds(devices[begin : begin + each])
    return speeds_by(found.all_gather(tf.constant(seconds)).numpy())


def _default_devices(needed, shape):
    logical = tf.config.list_logical_devices()
    accelerators = [d.name for d in logical if d.device_type in ("GPU", "TPU")]
    found = accelerators or [d.name for d in logical if d.device_type == "CPU"]
    kind = "accelerators" if accelerators else "CPU devices"
    if joined() is not None or coordinated() is not None:
        return _of_each_process(found, kind, needed, shape)
    if len(found) < needed:
        fix = "Make the mesh smaller"
        if not accelerators:
            call = f"`tfscale.use_virtual_devices({needed})`"
            fix += f", or call {call} before anything else"
        raise ValueError(
            "A mesh needs as many devices as the product of its axes. "
            f"Received: a mesh of {' x '.join(map(str, shape))} = {needed}, "
            f"but there are {len(found)} {kind}. {fix}."
        )
    return found[:needed]


def _of_each_process(found, kind, needed, shape):
    """As many devices of each process, one process after the other."""
    by_task = {}
    for name in found:
        spec = tf.DeviceSpec.from_string(name)
        by_task.setdefault((spec.job, spec.task), []).append(name)
    # "chief" comes before "worker".
    processes = [by_task[task] for task in sorted(by_task)]
    each, rest = divmod(needed, len(processes))
    if rest or any(len(devices) < each for devices in processes):
        counts = " or ".join(
            map(str, sorted({len(devices) for devices in processes}))
        )
        raise ValueError(
            "A mesh needs as many devices as the product of its axes, the "
            "same number in each process. Received: a mesh of "
            f"{' x '.join(map(str, shape))} = {needed}, but there are "
            f"{len(processes)} processes with {counts} {kind} each. Change the "
            "axes or name the `devices`; the launcher's --devices_per_worker "
            "makes virtual ones."
        )
    return [name for devices in processes for name in devices[:each]]
