"""The peak of a device of this machine, and the memory in use."""

import re
import resource
from collections.abc import Sequence

import tensorflow as tf

from tfscale.planner.device import Device
from tfscale.planner.measure import preset_of_gpu

# Of other peaks than the card of their name, by data sheets: on a PCIe board,
# on a bridge of two, and a part of a card.
_OTHERS = re.compile(r"H100 PCIe|NVL|MIG", re.IGNORECASE)


def device_here() -> tuple[Device | None, str]:
    """The planner's preset of this machine's devices, and what they are."""
    if tf.config.list_physical_devices("GPU"):
        preset, described = preset_of_gpu()
        if _OTHERS.search(described):
            preset = None
        return preset, described
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return None, "TPU" if "TPU" in kinds else "CPU"


def peak_flops(device: Device, is_half: bool) -> float | None:
    """FLOP/s of a logical device in 16 bits, or in float32; None if unknown."""
    if is_half:
        peak = device.flops
    elif tf.config.experimental.tensor_float_32_execution_enabled():
        peak = device.float32_flops
    else:
        return None
    # Logical devices share a card.
    cards = len(tf.config.list_physical_devices("GPU"))
    logical = len(tf.config.list_logical_devices("GPU"))
    return peak * cards / logical if cards and logical else peak


def memory_bytes(devices: Sequence[str]) -> float | None:
    """Bytes at the most so far: of the fullest accelerator, or this process.

    TensorFlow counts what accelerators of this process have allocated. CPUs,
    virtual ones too, share the memory of the process. None if neither is known.
    """
    found = []
    for device in devices:
        if "CPU" in device:
            continue
        try:
            info = tf.config.experimental.get_memory_info(device)
        except (ValueError, tf.errors.OpError):  # of another process, or a TPU
            continue
        found.append(info["peak"])
    if found or any("GPU" in device for device in devices):
        return max(found, default=None)
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
