"""Sums and exchanges over devices, written into the graph.

With n devices, a tensor of S bytes, a latency a and a bandwidth B, an
all-reduce takes (where each device sends and gets S bytes in S / B, and
latencies of several sends overlap)

    direct               a              + (n - 1) S / B
    parameter_server     2 a            + 2 (n - 1) S / B
    two_shot             2 a            + 2 (n - 1) / n S / B

No algorithm sends less than 2 (n - 1) / n S from each device. These add up all
devices at once, in their order, so the choice between them changes no digit. A
ring and recursive halving send as little as `two_shot` in more rounds, a tree
more: where every device reaches every other one they are never faster. Machines
of several devices share a wire, so a `two_shot` has two levels:

    machine 0   [0 1 2 3]     1. reduce-scatter inside of each machine
                 | | | |      2. all-reduce of each part between machines
    machine 1   [4 5 6 7]     3. all-gather inside of each machine

Every function takes a tensor of each device, on it, and the number of devices
of a machine, which follow each other (1: all reach each other alike). The
gradient is the one that TensorFlow finds, which is right for sums of
floating-point numbers.

Sources: Li et al., Scaling distributed machine learning with the parameter
server (2014); Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH (2005), for the bounds; Goyal et al.,
Accurate, large minibatch SGD (2017), section 4, for two levels.
"""

import itertools
import weakref
from collections.abc import Sequence

import tensorflow as tf

# TensorFlow cuts a tensor without copying it where a row of its first dim is
# aligned as Eigen wants it.
_ALIGNED_BYTES = 64

# The constants of a graph by number and device. Tensors would keep it alive.
_constants: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

# The dtypes of `NcclAllReduce`.
_NCCL_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_nccl_numbers = itertools.count()

Tensors = Sequence[tf.Tensor]


def direct(tensors: Tensors) -> list[tf.Tensor]:
    """An all-reduce: each device adds up the tensors of all."""
    return [_sum(tensor.device, tensors) for tensor in tensors]


def parameter_server(tensors: Tensors) -> list[tf.Tensor]:
    """An all-reduce: the first device sums for all others."""
    total = _sum(tensors[0].device, tensors)
    return [total, *(_moved(total, each.device) for each in tensors[1:])]


def two_shot(tensors: Tensors, machine: int = 1) -> list[tf.Tensor]:
    """An all-reduce: each device adds up one part of the tensors for all."""
    first = tensors[0]
    is_known = first.shape.is_fully_defined()
    shape = first.shape if is_known else tf.shape(first)
    shards = []
    for tensor in tensors:
        with tf.device(tensor.device):
            rows = tf.reshape(tensor, [-1, _row_length(tensor)])
            shards.append(tf.split(rows, _sizes(rows, len(tensors))))
    sums = _sums_of_shards(shards, [x.device for x in tensors], machine)
    wholes = []
    for tensor, gathered in zip(tensors, _exchanged(sums, machine)):
        with tf.device(tensor.device):
            wholes.append(tf.reshape(tf.concat(gathered, axis=0), shape))
    return wholes


def can_use_nccl(tensors: Tensors) -> bool:
    """Whether NCCL is there for these tensors.

    By TensorFlow's own rule (`MirroredStrategy` without `cross_device_ops`): it
    was built with CUDA, and all devices are GPUs and none a part of one,
    because NCCL counts chips. Only in a graph, where the operations of all
    devices run at the same time; alone, the first would wait for ever.
    """
    return (
        len(tensors) > 1
        and not tf.executing_eagerly()
        and tf.test.is_built_with_cuda()
        and all(tensor.dtype in _NCCL_DTYPES for tensor in tensors)
        and all("GPU:" in tensor.device.upper() for tensor in tensors)
        and len(tf.config.list_logical_devices("GPU"))
        == len(tf.config.list_physical_devices("GPU"))
    )


def by_nccl(tensors: Tensors) -> list[tf.Tensor]:
    """An all-reduce on several GPUs of this process, by NCCL."""
    # All operations of one name make up a collective.
    name = f"tfscale/{next(_nccl_numbers)}"
    sums = []
    for tensor in tensors:
        with tf.device(tensor.device):
            sums.append(
                tf.raw_ops.NcclAllReduce(
                    input=tensor,
                    reduction="sum",
                    num_devices=len(tensors),
                    shared_name=name,
                )
            )
    return sums


def reduce(tensors: Tensors, machine: int = 1) -> tf.Tensor:
    """The sum, on the first device only."""
    of_machines = [
        _sum(tensors[i].device, tensors[i : i + machine])
        for i in range(0, len(tensors), machine)
    ]
    return _sum(tensors[0].device, of_machines)


def reduce_scatter(
    tensors: Tensors, dim: int, machine: int = 1
) -> list[tf.Tensor]:
    """A part of the sum, cut along a dim, on each device."""
    shards = []
    for tensor in tensors:
        with tf.device(tensor.device):
            axis = _constant(dim, tensor.device)
            shards.append(tf.split(tensor, len(tensors), axis))
    return _sums_of_shards(shards, [x.device for x in tensors], machine)


def all_gather(tensors: Tensors, dim: int, machine: int = 1) -> list[tf.Tensor]:
    """All tensors one after the other along a dim, on each device."""
    wholes = []
    for tensor, gathered in zip(tensors, _exchanged(tensors, machine)):
        with tf.device(tensor.device):
            axis = _constant(dim, tensor.device)
            wholes.append(tf.concat(gathered, axis))
    return wholes


def _sums_of_shards(shards, devices, machine):
    """Device d's sum of part d: first inside of machines, then between."""
    numbers = range(len(devices))

    def inside(device, chunk):
        first = device - device % machine
        neighbors = range(first, first + machine)
        return _sum(devices[device], [shards[d][chunk] for d in neighbors])

    return [
        _sum(
            devices[d],
            [inside(peer, d) for peer in numbers[d % machine :: machine]],
        )
        for d in numbers
    ]


def _exchanged(shards, machine):
    """The parts of all devices, for each: between machines, then inside."""
    # A device that gets a part for its machine has a copy, which it sends on.
    copies: dict[tuple[int, int], tf.Tensor] = {}

    def sent_by(device, chunk):
        if device == chunk or machine == 1:
            return shards[chunk]
        if (device, chunk) not in copies:
            copies[device, chunk] = _moved(shards[chunk], shards[device].device)
        return copies[device, chunk]

    return [
        [
            sent_by(d - d % machine + chunk % machine, chunk)
            for chunk in range(len(shards))
        ]
        for d in range(len(shards))
    ]


def _sum(device, tensors):
    if len(tensors) == 1:
        return tensors[0]
    with tf.device(device):
        return tf.add_n(tensors)


def _moved(tensor, device):
    with tf.device(device):
        return tf.identity(tensor)


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


ALL_REDUCE = {
    "direct": direct,
    "two_shot": two_shot,
    "parameter_server": parameter_server,
}
