"""Tensors in shards: each device's shard as it is, read in any other division.

TensorFlow's checkpoint files keep slices of a tensor under its name and shape
(`SaveV2` with `shape_and_slices`), and return any other slice of it
(`RestoreV2`). So no process ever has a whole sharded variable, and a mesh of
other sizes reads the same files. They are written a few MB at a time, and
joined at the end.
"""

import dataclasses
import os

import tensorflow as tf

from tfscale.backup.files.storage import storage_of
from tfscale.sharding.sharding import Sharding

_DATA = ".data-00000-of-00001"
_CHUNK = 8 << 20
_MAX_CHUNKS = 256  # and files


@dataclasses.dataclass(frozen=True)
class Part:
    """A shard of a tensor with its value.

    Args:
        key: Name of the tensor.
        sharding: The sharding of the tensor.
        replica_and_rank: `(replica, rank)` of the shard.
        value: Tensor of shape `sharding.local_shape`.
    """

    key: str
    sharding: Sharding
    replica_and_rank: tuple[int, int]
    value: tf.Tensor


def write_parts(prefix: str, parts: list[Part]) -> None:
    """Writes shards into the checkpoint files `<prefix>.index` and `.data-*`.

    Args:
        prefix: Path without an ending.
        parts: Each shard of each tensor once. Each is removed once written, to
            free its memory.
    """
    parts.reverse()
    storage = storage_of(os.path.dirname(prefix))
    if not storage.joins_files:
        _write(prefix, parts, len(parts))
        return
    prefixes = []
    total = sum(part.sharding.local_bytes for part in parts)
    enough = max(_CHUNK, total // _MAX_CHUNKS)
    while parts:
        count = size = 0
        while count < len(parts) and (not count or size < enough):
            count += 1
            size += parts[-count].sharding.local_bytes
        prefixes.append(f"{prefix}.{len(prefixes)}")
        _write(prefixes[-1], parts, count)
        storage.flush([os.path.basename(prefixes[-1]) + _DATA])
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=prefix,
            delete_old_dirs=False,
        )


def _write(prefix, parts, count):
    """Writes the last `count` of the parts."""
    chunk = [parts.pop() for _ in range(count)]
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[part.key for part in chunk],
            shape_and_slices=[
                _slice(p.sharding, p.replica_and_rank) for p in chunk
            ],
            tensors=[part.value for part in chunk],
        )


def read_part(
    prefix: str,
    key: str,
    dtype,
    sharding: Sharding,
    replica_and_rank: tuple[int, int],
) -> tf.Tensor:
    """The shard of a tensor on a device, however it was divided when saved.

    Raises:
        tf.errors.DataLossError: If the file was changed.
    """
    with tf.device("CPU:0"):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[key],
            shape_and_slices=[_slice(sharding, replica_and_rank)],
            dtypes=[dtype],
        )
    return value


def _slice(sharding, replica_and_rank):
    """The format of TensorFlow: shape, then start and length of each dim."""
    if not sharding.is_sharded:
        return ""
    shape = " ".join(map(str, sharding.shape))
    slices = ":".join(
        f"{s.start},{s.stop - s.start}"
        for s in sharding.slices(*replica_and_rank)
    )
    return f"{shape} {slices}"
