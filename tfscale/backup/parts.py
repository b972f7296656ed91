"""Tensors in parts: each device's part as it is, read in any other division.

TensorFlow's checkpoint files keep slices of a tensor under its name and shape
(`SaveV2` with `shape_and_slices`), and give any other slice of it
(`RestoreV2`). So a sharded variable is whole in no process, neither when it is
saved nor when it is loaded, and a mesh of other sizes reads the same files.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfscale.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a tensor with its value.

    Args:
        key: Name of the tensor.
        sharding: How the tensor is sharded.
        place: `(replica, rank)` that has the part.
        value: Tensor of shape `sharding.local_shape`.
    """

    key: str
    sharding: Sharding
    place: tuple[int, int]
    value: tf.Tensor


def write_parts(prefix: str, parts: Sequence[Part]) -> None:
    """Writes parts into the checkpoint files `<prefix>.index` and `.data-*`.

    Args:
        prefix: Path without an ending.
        parts: Each part of each tensor once.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[part.key for part in parts],
            shape_and_slices=[_slice(p.sharding, p.place) for p in parts],
            tensors=[part.value for part in parts],
        )


def read_part(
    prefix: str, key: str, dtype, sharding: Sharding, place: tuple[int, int]
) -> tf.Tensor:
    """The part of a tensor that a device has, whoever wrote it.

    Args:
        prefix: As it was written to.
        key: Name of the tensor.
        dtype: Its dtype.
        sharding: How it is sharded now.
        place: `(replica, rank)` of the device.

    Raises:
        tf.errors.DataLossError: If what is read is not what was written.
    """
    with tf.device("CPU:0"):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[key],
            shape_and_slices=[_slice(sharding, place)],
            dtypes=[dtype],
        )
    return value


def _slice(sharding, place):
    """As TensorFlow writes it: shape, then start and length of each dim."""
    if not sharding.is_sharded:
        return ""
    shape = " ".join(map(str, sharding.shape))
    slices = ":".join(
        f"{s.start},{s.stop - s.start}" for s in sharding.slices(*place)
    )
    return f"{shape} {slices}"
