"""Sums and exchanges between worker processes, by TensorFlow's collectives.

`operations.py` sums over the devices of one process; here each worker has one
tensor. A device is in a group with the devices of the same number of the other
workers. A key identifies the calls that belong together. TensorFlow's strategy
passes keys when a function is called, which does not reach a function in a
branch of a loop. Here each device counts its collectives in a
variable: all workers run the same program, so the counts agree.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.cluster.initialize import Joined
from tfscale.cluster.initialize import joined
from tfscale.collectives import device_names
from tfscale.graphs.noting_scope import plain_variable

# Apart from those of TensorFlow's own strategies, which begin at 1.
_FIRST_GROUP = 1_000_000
_DEVICE_TYPES = ("CPU", "GPU", "TPU")
_MAX_DEVICES = 10_000

# The dtypes of collectives; others are converted to one of these.
_SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)


class Workers:
    """The worker processes; this one is the chief if its index is 0.

    `coordination` exchanges values beside collectives; `check_all_there` raises
    a `ConnectionError` if a worker is gone; within `naming_lost` so does an
    error of TensorFlow's.
    """

    def __init__(self, found: Joined):
        self.count = len(found.cluster.addresses)
        self.index = found.coordination.index
        self.check_all_there = found.failure_detector.check_all_there
        self.naming_lost = found.failure_detector.naming_lost
        self.coordination = found.coordination
        self._participants: dict[str, _Participant] = {}
        # By rank, which a function for tensors of several would not know.
        self._gather_functions: Any = collections.defaultdict(
            lambda: tf.function(
                self.all_gather, reduce_retracing=True, autograph=False
            )
        )
        self._default = device_names.full_name("/device:CPU:0")
        found.failure_detector.num_collectives = self._num_collectives

    def _num_collectives(self):
        """How often this worker has begun to wait for the others."""
        counts = [p.num_begun() for p in list(self._participants.values())]
        return sum(counts) + self.coordination.num_checks

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over the workers of each tensor, numbers of any dtype.

        All workers call it, for tensors of the same shapes in the same order;
        sums are equal to the last bit. Tensors on one device are sent together.
        """
        packs: dict[tuple[str, tf.DType], list[int]] = {}
        for index, tensor in enumerate(tensors):
            key = self._device_of(tensor), _dtype_of_numbers(tensor.dtype)
            packs.setdefault(key, []).append(index)
        sums = list(tensors)
        for (device, _), indices in packs.items():
            pack = [tensors[i] for i in indices]
            with tf.device(device):
                total = self._participant(device).all_reduce(_packed(pack))
                found = _unpacked(total, pack)
            for index, total in zip(indices, found):
                sums[index] = total
        return sums

    def all_gather(self, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """The workers' tensors one after the other; sizes may differ."""
        if tf.executing_eagerly():
            return self._gather_functions[tensor.shape.rank](tensor, axis)
        device = self._device_of(tensor)
        with tf.device(device):
            return self._participant(device).all_gather(tensor, axis)

    def from_first(self, value: tf.Tensor) -> tf.Tensor:
        """Worker 0's tensor, on all workers, which pass one of its shape."""
        if value.dtype == tf.string:
            return value
        bits = _as_integers(value)
        if self.index:
            bits = tf.zeros_like(bits)
        (total,) = self.all_reduce([bits])
        return _from_integers(total, value.dtype)

    def _participant(self, device):
        if device not in self._participants:
            self._participants[device] = _Participant(device, self.count)
        return self._participants[device]

    def _device_of(self, tensor):
        spec = tf.DeviceSpec.from_string(tensor.device or "")
        if spec.device_type is None:
            return self._default
        return device_names.full_name(tensor.device, self._default)


class _Participant:
    """A device, in collectives with those of the other workers."""

    def __init__(self, device, group_size):
        spec = tf.DeviceSpec.from_string(device)
        kind = _DEVICE_TYPES.index(spec.device_type)
        self._size = group_size
        self._group = _FIRST_GROUP + kind * _MAX_DEVICES + spec.device_index
        host = device_names.host_of(device)
        self._count = plain_variable(0, host, name="tfscale/count")
        # Operations that use it run in the order of the program.
        self._token = plain_variable(0.0, device, name="tfscale/token")
        self._host = host

    def num_begun(self) -> int:
        """How many collectives it has begun; in any thread or graph."""
        with tf.init_scope():
            return int(self._count)

    def all_reduce(self, tensor):
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor, merge_op="Add", final_op="Id", **self._arguments()
        )

    def all_gather(self, tensor, axis):
        # The first dim differs between workers, and is padded.
        axis %= tensor.shape.rank
        order = [axis, *(i for i in range(tensor.shape.rank) if i != axis)]
        back = [order.index(i) for i in range(tensor.shape.rank)]
        tensor = tf.transpose(tensor, order)
        dtype, tensor = tensor.dtype, _as_numbers(tensor)
        sizes = self._gather(tf.shape(tensor)[:1])
        largest = tf.reduce_max(sizes)
        more = largest - tf.shape(tensor)[0]
        padding = [[0, more], *([[0, 0]] * (tensor.shape.rank - 1))]
        gathered = self._gather(tf.pad(tensor, padding))
        found = tf.concat(
            [
                gathered[i * largest : i * largest + sizes[i]]
                for i in range(self._size)
            ],
            axis=0,
        )
        return tf.transpose(_from_numbers(found, dtype), back)

    def _gather(self, tensor):
        return tf.raw_ops.CollectiveGatherV2(input=tensor, **self._arguments())

    def _arguments(self):
        with tf.device(self._host):
            key = self._count.assign_add(1, read_value=True)
        return {
            "group_size": self._size,
            "group_key": self._group,
            "instance_key": key,
            "ordering_token": [self._token.handle],
        }


@functools.cache
def _workers(found: Joined) -> Workers:
    return Workers(found)


def workers() -> Workers | None:
    """The workers that this process has joined, or None if it is alone.

    Example:

    >>> workers() is None
    True
    """
    found = joined()
    return None if found is None else _workers(found)


def _dtype_of_numbers(dtype):
    dtype = dtype.real_dtype
    if dtype in _SUMMED:
        return dtype
    return tf.float32 if dtype.is_floating else tf.int64


def _as_numbers(x):
    """A tensor in a dtype of collectives; a complex number is two of them."""
    dtype = _dtype_of_numbers(x.dtype)
    return tf.bitcast(x, dtype) if x.dtype.is_complex else tf.cast(x, dtype)


def _from_numbers(x, dtype):
    return tf.bitcast(x, dtype) if dtype.is_complex else tf.cast(x, dtype)


def _packed(tensors):
    flat = [tf.reshape(_as_numbers(x), [-1]) for x in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def _unpacked(flat, tensors):
    sizes = []
    for x in tensors:
        size = x.shape.num_elements()
        size = tf.size(x) if size is None else size
        sizes.append(size * 2 if x.dtype.is_complex else size)
    vectors = [flat] if len(sizes) == 1 else tf.split(flat, sizes)
    unpacked = []
    for vector, x in zip(vectors, tensors):
        shape = x.shape if x.shape.is_fully_defined() else tf.shape(x)
        if x.dtype.is_complex:
            vector = tf.reshape(vector, [-1, 2])
        found = tf.reshape(_from_numbers(vector, x.dtype), shape)
        unpacked.append(tf.ensure_shape(found, x.shape))
    return unpacked


def _as_integers(value):
    """The bits of a tensor, which no sum with zeros changes."""
    if value.dtype == tf.bool:
        return tf.cast(value, tf.int32)
    if value.dtype.size < 4:
        return tf.cast(tf.bitcast(value, tf.uint8), tf.int32)
    return tf.bitcast(value, tf.int32)


def _from_integers(bits, dtype):
    if dtype == tf.bool:
        return tf.cast(bits, dtype)
    return tf.bitcast(
        tf.cast(bits, tf.uint8) if dtype.size < 4 else bits, dtype
    )


def check_one_process(strategy: Any, what: str, instead: str) -> None:
    """Raises a `ValueError` if a strategy is one over several workers."""
    if getattr(strategy.extended, "workers", None) is not None:
        raise ValueError(
            f"{what} is for one process. Received: a MeshStrategy over "
            f"{strategy.extended.workers.count} workers. {instead}"
        )
