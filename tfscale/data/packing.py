"""The scalars of a record as one vector for each dtype.

A graph that has an operation for each component grows with a table's columns:
of 300, the first batch took 10 seconds. Stacked and unstacked they are one.
AutoGraph would take longer than the graph: it reads the source of a function.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Packing:
    """How records are packed; components that are no scalars stay as they are.

    Attributes:
        specs: List of `tf.TensorSpec`, a packed record.

    Example:

    >>> scalar = tf.TensorSpec([], tf.float32)
    >>> packing = Packing({"a": scalar, "b": scalar})
    >>> packing.specs
    [TensorSpec(shape=(2,), dtype=tf.float32, name=None)]
    >>> float(packing.unpack(tf.unstack(tf.constant([[1.0, 2.0]])))["b"])
    2.0
    """

    def __init__(self, spec: Any):
        self._spec = spec
        flat = tf.nest.flatten(spec)
        groups: dict[Any, list[int]] = {}
        for number, one in enumerate(flat):
            key = one.dtype if one.shape.rank == 0 else number
            groups.setdefault(key, []).append(number)
        self._groups = list(groups.values())
        self.specs = [
            flat[first]
            if not others
            else tf.TensorSpec([1 + len(others)], flat[first].dtype)
            for first, *others in self._groups
        ]

    @tf.autograph.experimental.do_not_convert
    def pack(self, record: Any) -> list[tf.Tensor]:
        """The packed tensors of a record, or of a batch of records."""
        return self._packed(tf.nest.flatten(record), tf.stack)

    def pack_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The packed arrays of a flat batch of records."""
        return self._packed(arrays, np.stack)

    def _packed(self, flat, stack):
        return [
            stack([flat[number] for number in group], axis=-1)
            if len(group) > 1
            else flat[group[0]]
            for group in self._groups
        ]

    @tf.autograph.experimental.do_not_convert
    def unpack(self, packed: Sequence[tf.Tensor]) -> Any:
        """The record, or the batch of records, of packed tensors."""
        flat: list[Any] = [None] * sum(map(len, self._groups))
        for group, tensor in zip(self._groups, packed, strict=True):
            values = [tensor]
            if len(group) > 1:
                values = tf.unstack(tensor, num=len(group), axis=-1)
            for number, value in zip(group, values, strict=True):
                flat[number] = value
        return tf.nest.pack_sequence_as(self._spec, flat)
