"""All-reduce by NCCL, on GPUs of one process."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

# The dtypes of `NcclAllReduce`.
_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_numbers = itertools.count()


def can_reduce(tensors: Sequence[tf.Tensor]) -> bool:
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
        and all(tensor.dtype in _DTYPES for tensor in tensors)
        and all("GPU:" in tensor.device.upper() for tensor in tensors)
        and len(tf.config.list_logical_devices("GPU"))
        == len(tf.config.list_physical_devices("GPU"))
    )


def all_reduce(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of tensors on several GPUs, on each of them."""
    # All operations of one name make up a collective.
    name = f"tfscale/{next(_numbers)}"
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
