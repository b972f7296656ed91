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
from tfscale.variables.sharding import Sharding

_DATA = ".data-00000-of-00001"
# The memory that a save needs, in bytes; a choice.
_CHUNK = 8 << 20
_MAX_CHUNKS = 256  # and files


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """A shard of the tensor `key` with its value."""

    key: str
    sharding: Sharding
    replica_and_rank: tuple[int, int]
    value: tf.Tensor  # of shape `sharding.local_shape`


def write_shards(prefix: str, shards: list[TensorShard]) -> None:
    """Writes shards into the checkpoint files `<prefix>.index` and `.data-*`.

    Each shard is removed from the list once written, to free its memory.
    """
    shards.reverse()
    storage = storage_of(os.path.dirname(prefix))
    if not storage.joins_files:
        _write(prefix, shards, len(shards))
        return
    prefixes = []
    total = sum(shard.sharding.local_bytes for shard in shards)
    enough = max(_CHUNK, total // _MAX_CHUNKS)
    while shards:
        count = size = 0
        while count < len(shards) and (not count or size < enough):
            count += 1
            size += shards[-count].sharding.local_bytes
        prefixes.append(f"{prefix}.{len(prefixes)}")
        _write(prefixes[-1], shards, count)
        storage.flush([os.path.basename(prefixes[-1]) + _DATA])
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=prefix,
            delete_old_dirs=False,
        )


def _write(prefix, shards, count):
    chunk = [shards.pop() for _ in range(count)]
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[shard.key for shard in chunk],
            shape_and_slices=[
                slice_of(p.sharding, p.replica_and_rank) for p in chunk
            ],
            tensors=[shard.value for shard in chunk],
        )


def read_shard(
    prefix: str,
    key: str,
    dtype,
    sharding: Sharding,
    replica_and_rank: tuple[int, int],
) -> tf.Tensor:
    """The shard of a tensor on a device, however it was divided when saved."""
    folder, name = os.path.split(prefix)
    with storage_of(folder).without_patterns() as path, tf.device("CPU:0"):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=f"{path}/{name}",
            tensor_names=[key],
            shape_and_slices=[slice_of(sharding, replica_and_rank)],
            dtypes=[dtype],
        )
    return value


def slice_of(sharding: Sharding, replica_and_rank: tuple[int, int]) -> str:
    """A shard in TensorFlow's words: shape, start and length of each dim."""
    if not sharding.is_sharded:
        return ""
    shape = " ".join(map(str, sharding.shape))
    slices = ":".join(
        f"{s.start},{s.stop - s.start}"
        for s in sharding.slices(*replica_and_rank)
    )
    return f"{shape} {slices}"
