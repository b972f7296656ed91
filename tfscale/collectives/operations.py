"""Sums and exchanges of tensors on several devices: what tfscale calls.

All sums of replicas and model ranks of a process are made here, so the
algorithm is chosen in one place. Between processes the collectives are
TensorFlow's.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfscale.collectives import algorithms
from tfscale.collectives import costs
from tfscale.collectives import device_names
from tfscale.collectives import links


def all_reduce(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of the tensors of several devices, on each of them.

    Equal to the last bit on all devices. By NCCL on GPUs where TensorFlow has
    it; else by the algorithm that should be the fastest for this size and these
    links.

    Args:
        tensors: One for each device, on it; of one shape and dtype.

    Returns:
        The sums, in the order of the tensors.

    Raises:
        ValueError: If the tensors differ in shape or dtype.

    Example:

    >>> import tensorflow as tf
    >>> [float(x) for x in all_reduce([tf.constant(1.0), tf.constant(2.0)])]
    [3.0, 3.0]
    """
    tensors = _checked(tensors)
    if len(tensors) == 1:
        return _itself(tensors)
    if algorithms.can_use_nccl(tensors):
        return algorithms.by_nccl(tensors)
    # Between machines not by costs: measured costs vary, and sums in another
    # order have other digits.
    if (machine := _machine(tensors)) > 1:
        return algorithms.two_shot(tensors, machine)
    return algorithms.ALL_REDUCE[fastest(tensors)](tensors)


def reduce(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of an `all_reduce` to the last bit, on the first device only."""
    tensors = _checked(tensors)
    if len(tensors) == 1:
        return _itself(tensors)[0]
    return algorithms.reduce(tensors, _machine(tensors))


def reduce_scatter(
    tensors: Sequence[tf.Tensor], dim: int = 0
) -> list[tf.Tensor]:
    """A part of the sum of the tensors of several devices, on each of them.

    Each element is equal to the last bit to that of an `all_reduce`.

    Args:
        tensors: One for each device, on it; of one shape and dtype.
        dim: Along which dim the sum is divided.

    Returns:
        The parts, in the order of the tensors.

    Raises:
        ValueError: As for `all_reduce`, or if the number of devices does not
            divide the dim.

    Example:

    >>> import tensorflow as tf
    >>> parts = reduce_scatter([tf.constant([1.0, 2.0])] * 2)
    >>> [part.numpy().tolist() for part in parts]
    [[2.0], [4.0]]
    """
    tensors = _checked(tensors)
    for tensor in tensors:
        _check_dim(tensor, dim)
        size = None if tensor.shape.rank is None else tensor.shape[dim]
        if size is not None and size % len(tensors):
            raise ValueError(
                "The number of devices must divide the dim of a "
                f"reduce-scatter. Received: dim={dim} of shape {tensor.shape} "
                f"for {len(tensors)} devices. Use an all_reduce or another dim."
            )
    if len(tensors) == 1:
        return _itself(tensors)
    return algorithms.reduce_scatter(tensors, dim, _machine(tensors))


def all_gather(tensors: Sequence[tf.Tensor], dim: int = 0) -> list[tf.Tensor]:
    """The tensors of several devices one after the other, on each of them.

    Args:
        tensors: One for each device, on it; they may differ in `dim`.
        dim: Along which dim they are put together.

    Returns:
        A whole tensor for each device.

    Raises:
        ValueError: If the tensors differ in dtype or in another dim.

    Example:

    >>> import tensorflow as tf
    >>> wholes = all_gather([tf.constant([1.0]), tf.constant([2.0])])
    >>> [whole.numpy().tolist() for whole in wholes]
    [[1.0, 2.0], [1.0, 2.0]]
    """
    tensors = _checked(tensors, dim)
    if len(tensors) == 1:
        return _itself(tensors)
    return algorithms.all_gather(tensors, dim, _machine(tensors))


def in_groups(
    collective: Callable[[list], list],
    tensors: Sequence[tf.Tensor],
    groups: Sequence[Sequence[int]],
) -> tuple[tf.Tensor, ...]:
    """Calls a collective for several groups of devices, given by index.

    Each device is in one group; results are in the order of the tensors.
    """
    results = {}
    for group in groups:
        found = collective([tensors[index] for index in group])
        results.update(zip(group, found, strict=True))
    return tuple(results[index] for index in range(len(tensors)))


def fastest(tensors: Sequence[tf.Tensor]) -> str:
    """The name of the algorithm for an all-reduce, which changes no digit."""
    size = tensors[0].shape.num_elements()
    if size is None:
        return "direct"
    devices = tuple(tensor.device for tensor in tensors)
    are_of_several = any(device_names.machines(devices))
    between = links.costs(devices) if are_of_several else costs.in_process()
    num_bytes = size * tensors[0].dtype.size
    return costs.fastest(between, len(tensors), num_bytes)


def _machine(tensors):
    """How many devices each of several machines has; 1 if it does not matter.

    Devices of a machine follow each other.
    """
    machines = device_names.machines(tuple(tensor.device for tensor in tensors))
    size = machines.count(0)
    regular = sorted([*range(max(machines) + 1)] * size)
    return size if size < len(machines) and regular == [*machines] else 1


def _itself(tensors):
    with tf.device(tensors[0].device):
        return [tf.identity(tensors[0])]


def _checked(tensors, differ_in=None):
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtypes = {tensor.dtype.name for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            "All tensors of a collective must have one dtype. Received: "
            f"{', '.join(sorted(dtypes))}. Cast them first."
        )
    shapes = []
    for tensor in tensors:
        shape = tensor.shape
        if differ_in is not None and shape.rank is not None:
            _check_dim(tensor, differ_in)
            sizes = shape.as_list()
            sizes[differ_in] = None
            shape = tf.TensorShape(sizes)
        shapes.append(shape)
        if not shape.is_compatible_with(shapes[0]):
            raise ValueError(
                "All tensors of a collective must have one shape, except for "
                "the concatenated dim. Received: shapes "
                f"{[str(each.shape) for each in tensors]}."
            )
    return tensors


def _check_dim(tensor, dim):
    rank = tensor.shape.rank
    if rank is not None and not -rank <= dim < rank:
        raise ValueError(
            "`dim` must be one of the dims of the tensors. Received: "
            f"dim={dim} for shape {tensor.shape}."
        )
