"""Writes a plan into the graph, on the devices of its tensors."""

import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfscale.collectives.planning.collective_plan import CollectivePlan
from tfscale.collectives.planning.contents import SHARDED

# TensorFlow cuts a tensor without copying it where a row of its first dim is
# aligned as Eigen wants it.
_ALIGNED_BYTES = 64

# The constants of a graph by number and device. Tensors would keep it alive.
_constants: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def execute(
    plan: CollectivePlan, tensors: Sequence[tf.Tensor], *, dim: int = 0
) -> list[tf.Tensor | None]:
    """Runs a plan on tensors of its devices; returns each device's result.

    After a reduce only device 0 has one, and the others have None. The gradient
    is the one that TensorFlow finds, which is right for sums of floating-point
    numbers.

    >>> import tensorflow as tf
    >>> from tfscale.collectives.planning.algorithms import direct
    >>> tensors = [tf.constant([1.0, 2.0]), tf.constant([10.0, 20.0])]
    >>> for total in execute(direct("all_reduce", 2), tensors):
    ...     print(total.numpy())
    [11. 22.]
    [11. 22.]
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    _check(plan, tensors, dim)
    if plan.num_devices == 1:
        with tf.device(tensors[0].device):
            return [tf.identity(tensors[0])]
    held = _Held(plan, tensors, dim)
    for sends in plan.rounds:
        held.play(sends)
    return held.results()


class _Held:
    """The chunks of each device: tensors, perhaps on another device."""

    def __init__(self, plan, tensors, dim):
        self._plan, self._dim = plan, dim
        self._devices = [tensor.device for tensor in tensors]
        first = tensors[0]
        is_known = first.shape.is_fully_defined()
        self._shape = first.shape if is_known else tf.shape(first)
        self._values = {}
        for device, tensor in enumerate(tensors):
            with tf.device(tensor.device):
                values = self._cut(device, tensor)
            for chunk, value in values.items():
                self._values[device, chunk] = value

    def play(self, sends):
        """One round: each device sends what it had before."""
        arriving, new = {}, {}
        for send in sends:
            value = self._here(send.source, send.chunk)
            key = send.target, send.chunk
            if send.adds:
                arriving.setdefault(key, {})[send.source] = value
            else:
                new[key] = value
        for (target, chunk), operands in arriving.items():
            operands[target] = self._values[target, chunk]
            with tf.device(self._devices[target]):
                # In the order of devices: the same on each.
                new[target, chunk] = tf.add_n(
                    [operands[device] for device in sorted(operands)]
                )
        self._values |= new

    def results(self):
        """The results of all devices."""
        plan, results = self._plan, []
        for device, name in enumerate(self._devices):
            if plan.operation == "reduce" and device:
                results.append(None)
                continue
            with tf.device(name):
                results.append(self._joined(device))
        return results

    def _here(self, device, chunk):
        """The copy that a device has of a chunk."""
        value = self._values[device, chunk]
        if value.device != self._devices[device]:
            with tf.device(self._devices[device]):
                value = self._values[device, chunk] = tf.identity(value)
        return value

    def _cut(self, device, tensor):
        count = self._plan.num_chunks
        if self._plan.operation == "reduce_scatter":
            axis = _constant(self._dim, tensor.device)
            return dict(enumerate(tf.split(tensor, count, axis)))
        if self._plan.operation in SHARDED:
            return {device: tensor}
        if count == 1:
            return {0: tensor}
        rows = tf.reshape(tensor, [-1, _row_length(tensor)])
        return dict(enumerate(tf.split(rows, _sizes(rows, count))))

    def _joined(self, device):
        plan = self._plan
        if plan.operation == "reduce_scatter":
            return self._here(device, device)
        if plan.num_chunks == 1:
            return self._here(device, 0)
        values = [
            self._values[device, chunk] for chunk in range(plan.num_chunks)
        ]
        if plan.operation in SHARDED:
            axis = _constant(self._dim, self._devices[device])
            return tf.concat(values, axis)
        return tf.reshape(tf.concat(values, axis=0), self._shape)


def _constant(number, device):
    """A number on a device, where one operation of the graph has it for all."""
    if tf.executing_eagerly():
        return number
    graph = tf.compat.v1.get_default_graph()
    names = _constants.setdefault(graph, {})
    if (number, device) not in names:
        with tf.control_dependencies(None), tf.device(device):
            names[number, device] = tf.constant(number).name
    return graph.get_tensor_by_name(names[number, device])


def _row_length(tensor):
    aligned = _ALIGNED_BYTES // tensor.dtype.size
    size = tensor.shape.num_elements()
    return aligned if size is not None and size % aligned == 0 else 1


def _sizes(rows, count):
    """As equal as they can be; the first ones are larger by one."""
    if rows.shape[0] is not None:
        each, more = divmod(rows.shape[0], count)
        return [each + 1] * more + [each] * (count - more) if more else count
    number = tf.shape(rows)[0]
    return number // count + tf.cast(tf.range(count) < number % count, tf.int32)


def _check(plan, tensors, dim):
    if len(tensors) != plan.num_devices:
        raise ValueError(
            "A collective needs one tensor for each device of its plan. "
            f"Received: {len(tensors)} tensors for a plan of "
            f"{plan.num_devices} devices ({plan.name} {plan.operation})."
        )
    dtypes = {tensor.dtype.name for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            "All tensors of a collective must have one dtype. Received: "
            f"{', '.join(sorted(dtypes))}. Cast them first."
        )
    for device, tensor in enumerate(tensors):
        _check_shape(plan, device, tensor, tensors[0], dim)


def _check_shape(plan, device, tensor, first, dim):
    shape, expected = tensor.shape, first.shape
    is_known = shape.rank is not None and expected.rank == shape.rank
    if plan.operation in SHARDED and is_known:
        if not -shape.rank <= dim < shape.rank:
            raise ValueError(
                "`dim` must be one of the dims of the tensors. Received: "
                f"dim={dim} for shape {shape} of device {device}."
            )
        if plan.operation != "reduce_scatter":
            shape, expected = shape.as_list(), expected.as_list()
            shape[dim] = expected[dim] = None
            shape, expected = tf.TensorShape(shape), tf.TensorShape(expected)
    if not shape.is_compatible_with(expected):
        raise ValueError(
            "All tensors of a collective must have one shape, except for the "
            f"concatenated dim. Received: shape {tensor.shape} of device "
            f"{device}, {first.shape} before."
        )
    if plan.operation == "reduce_scatter" and shape.rank is not None:
        size = shape[dim]
        if size is not None and size % plan.num_devices:
            raise ValueError(
                "The number of devices must divide the dim of a "
                f"reduce-scatter. Received: dim={dim} of shape {tensor.shape} "
                f"for {plan.num_devices} devices. Use an all_reduce or another "
                "dim."
            )
