"""The rows of a microbatch that fit the memory of the devices.

Memory is estimated from the graphs of a step of one row and of many rows, which
are traced and never run. Memory at each moment of a step is linear in the rows,
so the peak between them is at most that of the straight line.
"""

import collections
import math
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.free_memory import free_bytes
from tfscale.graphs.memory import peak_bytes
from tfscale.graphs.noting_scope import NotingScope
from tfscale.graphs.noting_scope import outside_scopes
from tfscale.step import step_context
from tfscale.step.runners.gradient_capture import GradientCapture
from tfscale.variables.of_variable import sharding_of

_MANY_ROWS = 1024
# The rest is for the workspace of operations and for other programs.
_USABLE = 0.9


def rows_that_fit(
    model: keras.Model, element_spec: Any, memory_limit: float | None
) -> int:
    """The largest number of rows of a microbatch; less than 1 if none fits.

    `element_spec` is what a replica gets of a step; `memory_limit` the bytes
    that each device may use, or None for all that it has.

    Raises:
        ValueError: If the memory of a step, or of a device, is not known.
    """
    one, many = (
        outside_scopes(_bytes_of_step, model, element_spec, rows)
        for rows in (1, _MANY_ROWS)
    )
    by_row = max(many - one, 1) / (_MANY_ROWS - 1)
    weights = model.trainable_variables
    sums = sum(4 * math.prod(sharding_of(v).local_shape) for v in weights)
    free = _free_bytes(weights, memory_limit) - sums
    rows = 1 + math.floor((free - one) / by_row)
    return min(rows, tf.int32.max)


def _bytes_of_step(model, element_spec, rows):
    gradients = []

    def placeholder(spec):
        if spec is None:
            return None
        shape = [rows, *spec.shape[1:]] if spec.shape.rank else ()
        return tf.compat.v1.placeholder(spec.dtype, shape)

    def build():
        capture = GradientCapture(model.optimizer)
        data = keras.tree.map_structure(placeholder, element_spec)
        # No variable is changed.
        with (
            NotingScope(collect_losses=True),
            step_context.within(gradient_capture=capture),
        ):
            model.train_step(data)
        gradients.extend(g for g in capture.gradients if g is not None)

    try:
        tf.compat.v1.wrap_function(build, [])
        return peak_bytes(gradients)
    except Exception as error:
        raise ValueError(
            "num_microbatches='auto' must know what a step of one row takes of "
            f"the memory. Received: {model.name!r}, of which it is not known "
            f"({type(error).__name__}: {error}) Give a number of microbatches."
        ) from error


def _free_bytes(variables, memory_limit):
    """Bytes that each device of some variables may still take."""
    devices = {
        component.device
        for variable in variables
        for component in getattr(variable.value, "values", [variable.value])
    }
    # All CPU devices of a process have one memory.
    sharing = collections.Counter(map(_name_of_memory, devices))
    return min(
        _USABLE * _free_bytes_of(name, memory_limit) / num_devices
        for name, num_devices in sharing.items()
    )


def _name_of_memory(device):
    spec = tf.DeviceSpec.from_string(device)
    is_cpu = spec.device_type == "CPU"
    return "CPU:0" if is_cpu else f"{spec.device_type}:{spec.device_index}"


def _free_bytes_of(name, limit):
    if name == "CPU:0" and limit is None:
        free = free_bytes()
        if free is None:
            raise ValueError(
                "num_microbatches='auto' must be told how much memory there is "
                "where the system does not say it. Received: no MemAvailable "
                "in /proc/meminfo. Give `memory_limit`, in bytes, or a number "
                "of microbatches."
            )
        return free
    if limit is None:
        limit = next(
            device.memory_limit
            for device in symbols.list_local_devices()
            if device.name.endswith(name)
        )
    return limit - tf.config.experimental.get_memory_info(name)["current"]
