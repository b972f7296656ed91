"""One physical device as several logical ones, for experiments and tests."""

import tensorflow as tf

from tfscale.integers import check_integer


def use_virtual_devices(
    num_devices: int,
    device_type: str = "CPU",
    *,
    memory_limit: int | None = None,
) -> None:
    """Splits the first physical device into several logical ones.

    With it meshes run on a machine without accelerators, or with one. Call it
    before TensorFlow starts its devices, that is before the first tensor,
    variable or list of logical devices.

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
    check_integer("num_devices", num_devices)
    if (device_type == "GPU" and num_devices > 1) == (memory_limit is None):
        raise ValueError(
            "`memory_limit` must be given to split a GPU, and only then. "
            f"Received: num_devices={num_devices}, "
            f"device_type={device_type!r}, memory_limit={memory_limit}."
        )
    physical = tf.config.list_physical_devices(device_type)
    if not physical:
        types = {d.device_type for d in tf.config.list_physical_devices()}
        raise ValueError(
            "Virtual devices must split a physical device of their type. "
            f"Received: device_type={device_type!r}, but this machine has only "
            f"{', '.join(sorted(types))}."
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
                "`use_virtual_devices` must be called before TensorFlow "
                "starts its devices (with the first tensor, variable or list "
                f"of logical devices). Received: num_devices={num_devices}, "
                f"but TensorFlow already runs with {started} {device_type} "
                "devices. Call it right after the imports."
            ) from error
