"""The FLOPs of a model that trains; the peak and the memory of its devices."""

import math
import re
import resource
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs.flops import training_flops
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.planner.device import Device
from tfscale.planner.measure import preset_of_gpu


def check_peak(peak_tflops: float | None) -> None:
    """Raises a ValueError if a `peak_tflops` is no peak."""
    if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
        raise ValueError(
            "`peak_tflops` must be above 0: 10^12 FLOP/s of a device. "
            f"Received: peak_tflops={peak_tflops!r}. Omit it if it is "
            "unknown."
        )


class Utilization:
    """Counts FLOPs once for each set of trainable weights.

    `device` is the planner's device of this machine, or None.
    """

    def __init__(self, peak_tflops: float | None):
        self._given = peak_tflops and 1e12 * peak_tflops
        self._flops: int | None = None
        self._peak: float | None = None
        self._counted: Any = None
        self._model: Callable[[], Any] = lambda: None
        self.device, self._described = device_here()

    def count(self, model: Any, element_spec: Any) -> str | None:
        """Counts the FLOPs of a built model, if that was not done before.

        Returns a line that says why a figure is left out, or None.
        """
        weights = [id(v) for v in model.trainable_variables]
        counted = weights, element_spec
        if self._model() is model and self._counted == counted:
            return None
        self._model, self._counted = weakref.ref(model), counted
        self._flops = self._peak = None
        try:
            self._flops = _flops_of(model, element_spec)
        except ValueError as error:
            return f"No `tflops`: {error}."
        self._peak = self._given
        if self._peak is None and self.device is not None:
            self._peak = peak_flops(self.device, _is_half(model))
        if self._peak is not None:
            return None
        return (
            f"No `mfu`: the peak of this device ({self._described}) is not "
            "known. Pass `peak_tflops` to the callback."
        )

    def figures(self, model: Any, examples: float) -> dict[str, float]:
        """`tflops` and `mfu` at so many examples in a second, where known."""
        if self._flops is None:
            return {}
        strategy = model.distribute_strategy
        mesh = getattr(strategy, "mesh", None)
        count = (
            strategy.num_replicas_in_sync if mesh is None else mesh.devices.size
        )
        flops = self._flops * examples / count
        figures = {"tflops": flops / 1e12}
        if self._peak is not None:
            figures["mfu"] = flops / self._peak
        return figures


def _flops_of(model, element_spec):
    inner = model.model if isinstance(model, WrappedModel) else model
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    kind = tf.distribute.ParameterServerStrategy
    if inner.__class__.train_step is not keras.Model.train_step:
        raise ValueError("the model has a `train_step` of its own")
    if isinstance(model.distribute_strategy, kind):
        raise ValueError("the workers of parameter servers may change")
    if not all(
        isinstance(spec, tf.TensorSpec) and None not in spec.shape[1:]
        for spec in tf.nest.flatten(x)
    ):
        raise ValueError("the inputs have sizes that are not known")
    try:
        return training_flops(inner, x)
    except Exception as error:  # whatever layers raise
        raise ValueError(f"the model was not traced: {error}") from error


def _is_half(model):
    """Whether most weights are used in 16 bits."""
    sizes = {True: 0, False: 0}
    for layer in attributes.flatten_layers(model):
        is_half = "float16" in str(layer.compute_dtype)
        for variable in attributes.direct_variables(layer):
            sizes[is_half] += math.prod(variable.shape)
    return sizes[True] > sizes[False]


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
