"""The operators of a tensor, for objects that are converted to one."""

import tensorflow as tf


class TensorOperators:
    """All operators of `tf.Tensor` but `==` and `!=`, of the tensor."""


def _of_tensor(name):
    def operator(self, *args):
        return getattr(tf.convert_to_tensor(self), name)(*args)

    return operator


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(TensorOperators, _name, _of_tensor(_name))
