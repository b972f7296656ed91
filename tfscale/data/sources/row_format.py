"""How rows of many columns travel through a pipeline: packed.

Scalars of one dtype are one vector, so that graphs do not grow with columns.
Lists that differ in length are serialized tensors. `RowFormat.decode` makes the
record of a row again: dicts of dicts.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.data.packing import Packing

_TensorProto = type(tf.make_tensor_proto(0))
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A column without objects."""

    dtype: tf.DType
    shape: tuple[int, ...] | None  # of each row; None where rows differ
    rank: int  # how deep the lists are

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of a row as it is read."""
        if self.shape is None:
            return tf.TensorSpec([], tf.string)
        return tf.TensorSpec(self.shape, self.dtype)

    def parsed(self, row: tf.Tensor) -> tf.Tensor:
        """The array of a serialized row."""
        if self.shape is not None:
            return row
        array = tf.io.parse_tensor(row, self.dtype)
        return tf.ensure_shape(array, [None] * self.rank)


class RowFormat:
    """The columns of a row, by the paths of keys that lead to them.

    `spec` is a row as it is read; `takes_batches` says whether `decode` takes
    batches of rows, too.
    """

    def __init__(self, leaves: Mapping[Path, Leaf]):
        self.leaves = dict(leaves)
        self._packing = Packing([leaf.spec for leaf in leaves.values()])
        self.spec = tuple(self._packing.specs)
        self.takes_batches = all(
            leaf.shape is not None for leaf in leaves.values()
        )

    def packed(self, columns: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Rows as they are read; `columns` come in the order of the leaves."""
        return self._packing.pack_arrays(list(columns))

    def decode(self, *row: tf.Tensor) -> dict[str, Any]:
        """The record of a row as it is read."""
        columns = zip(self.leaves.items(), self._packing.unpack(row))
        whole: dict[str, Any] = {}
        for ((*path, last), leaf), column in columns:
            inner = whole
            for key in path:
                inner = inner.setdefault(key, {})
            inner[last] = leaf.parsed(column)
        return whole


def serialized(array: np.ndarray, dtype: tf.DType) -> bytes:
    """An array as `tf.io.parse_tensor` reads it.

    `tf.make_tensor_proto` takes seven times as long.
    """
    text = dtype == tf.string
    proto = _TensorProto(
        dtype=dtype.as_datatype_enum,
        string_val=array.reshape(-1).tolist() if text else (),
        tensor_content=b"" if text else array.tobytes(),
    )
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    return proto.SerializeToString()
