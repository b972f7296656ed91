"""Sums and exchanges of tensors on several devices: what tfscale calls.

All sums of replicas and model ranks of a process are made here, so the
algorithm is chosen in one place. Between processes the collectives are
TensorFlow's.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfscale.collectives import links
from tfscale.collectives import nccl
from tfscale.collectives.execute import execute
from tfscale.collectives.planning.algorithms import ALGORITHMS
from tfscale.collectives.planning.algorithms import direct
from tfscale.collectives.planning.algorithms import hierarchical
from tfscale.collectives.planning.choosing import choose
from tfscale.collectives.planning.collective_plan import CollectivePlan

_hierarchical = functools.lru_cache(maxsize=256)(hierarchical)


def all_reduce(
    tensors: Sequence[tf.Tensor], *, plan: str | CollectivePlan = "auto"
) -> list[tf.Tensor]:
    """The sum of the tensors of several devices, on each of them.

    Equal to the last bit on all devices.

    Args:
        tensors: One for each device, on it; of one shape and dtype.
        plan: `"auto"`: by NCCL on GPUs where TensorFlow has it; between
            machines of several devices `hierarchical`; else what `choose` says
            for this size and these links. Or the name of an algorithm; or a
            plan for this number of devices.

    Returns:
        The sums, in the order of the tensors.

    Raises:
        ValueError: If the tensors differ in shape or dtype, or the plan is for
            another operation or number of devices.

    Example:

    >>> import tensorflow as tf
    >>> [float(x) for x in all_reduce([tf.constant(1.0), tf.constant(2.0)])]
    [3.0, 3.0]
    """
    if plan == "auto" and nccl.can_reduce(tensors):
        return nccl.all_reduce(tensors)
    return execute(plan_of("all_reduce", tensors, plan), tensors)


def reduce(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of an `all_reduce` to the last bit, on the first device only."""
    total, *_ = execute(plan_of("reduce", tensors), tensors)
    return total


def reduce_scatter(
    tensors: Sequence[tf.Tensor],
    dim: int = 0,
    *,
    plan: str | CollectivePlan = "auto",
) -> list[tf.Tensor]:
    """A part of the sum of the tensors of several devices, on each of them.

    Each element is equal to the last bit to that of an `all_reduce` by the
    same kind of plan.

    Args:
        tensors: One for each device, on it; of one shape and dtype.
        dim: Along which dim the sum is divided.
        plan: See `all_reduce`; never by NCCL, which has no such operation in
            TensorFlow.

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
    return execute(plan_of("reduce_scatter", tensors, plan), tensors, dim=dim)


def all_gather(
    tensors: Sequence[tf.Tensor],
    dim: int = 0,
    *,
    plan: str | CollectivePlan = "auto",
) -> list[tf.Tensor]:
    """The tensors of several devices one after the other, on each of them.

    Args:
        tensors: One for each device, on it; they may differ in `dim`.
        dim: Along which dim they are put together.
        plan: See `reduce_scatter`.

    Returns:
        A whole tensor for each device.

    Raises:
        ValueError: If the tensors differ in dtype or in another dim, or the
            plan is for another operation or number of devices.

    Example:

    >>> import tensorflow as tf
    >>> wholes = all_gather([tf.constant([1.0]), tf.constant([2.0])])
    >>> [whole.numpy().tolist() for whole in wholes]
    [[1.0, 2.0], [1.0, 2.0]]
    """
    made = plan_of("all_gather", tensors, plan, len(tensors))
    return execute(made, tensors, dim=dim)


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


def plan_of(operation, tensors, plan="auto", num_shards=1):
    """The plan for tensors, each one of `num_shards` shards."""
    if plan == "auto":
        devices = tuple(tensor.device for tensor in tensors)
        per_machine = _devices_per_machine(links.machines(devices))
        if per_machine:
            # Not by costs: measured costs vary, and sums in another order have
            # other digits.
            return _hierarchical(
                operation, len(tensors), devices_per_machine=per_machine
            )
        size = tensors[0].shape.num_elements()
        if size is None:
            return direct(operation, len(tensors))
        num_bytes = num_shards * size * tensors[0].dtype.size
        # The power of two above it: no model is finer, and few sizes are
        # simulated.
        num_bytes = 1 << num_bytes.bit_length()
        costs = links.costs(devices)
        return choose(operation, len(tensors), num_bytes, costs=costs)
    if isinstance(plan, CollectivePlan):
        if (plan.operation, plan.num_devices) != (operation, len(tensors)):
            raise ValueError(
                "A plan must match the operation and the number of devices. "
                f"Received: {plan.name} {plan.operation} for "
                f"{plan.num_devices} devices, for an {operation} over "
                f"{len(tensors)}."
            )
        return plan
    if plan not in tuple(ALGORITHMS):
        raise ValueError(
            "`plan` must be 'auto', a `tfscale.collectives.CollectivePlan` or "
            f"one of {', '.join(ALGORITHMS)}. Received: {plan!r}."
        )
    return ALGORITHMS[plan](operation, len(tensors))


def _devices_per_machine(machines):
    """How many devices each of several machines has; `None` for one each."""
    size = machines.count(0)
    if size == 1 or size == len(machines):
        return None
    regular = [*range(max(machines) + 1)] * size
    return size if sorted(regular) == list(machines) else None
