"""A tensor of each microbatch, for what goes in and out of a loop."""

import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Array:
    """A tensor of each microbatch, whose numbers of rows may differ.

    `handle` is what `tf.TensorArray` has too. Its methods take twice as long to
    trace, and this is called for every microbatch.
    """

    handle: tf.Tensor
    spec: tf.TensorSpec
    device: str

    @classmethod
    def of(cls, size: int, like: Any, device: str) -> "Array":
        """An array of `size` tensors like a tensor or spec."""
        with tf.device(device):
            handle = tf.raw_ops.TensorListReserve(
                element_shape=_shape_argument(like.shape),
                num_elements=size,
                element_dtype=like.dtype,
            )
        return cls(handle, tf.TensorSpec(like.shape, like.dtype), device)

    def read(self, microbatch: Any) -> tf.Tensor:
        """The tensor of a microbatch, as soon as it is there."""
        with tf.device(self.device), tf.control_dependencies(None):
            tensor = tf.raw_ops.TensorListGetItem(
                input_handle=self.handle,
                index=microbatch,
                element_shape=_shape_argument(self.spec.shape),
                element_dtype=self.spec.dtype,
            )
        tensor.set_shape(self.spec.shape)
        return tensor

    def write(self, microbatch: Any, tensor: tf.Tensor) -> "Array":
        """The array with the tensor of a microbatch."""
        with tf.device(self.device):
            handle = tf.raw_ops.TensorListSetItem(
                input_handle=self.handle, index=microbatch, item=tensor
            )
        return dataclasses.replace(self, handle=handle)


def _shape_argument(shape):
    if shape.rank is None:
        return -1
    sizes = [-1 if size is None else size for size in shape]
    return tf.constant(sizes, tf.int32)
