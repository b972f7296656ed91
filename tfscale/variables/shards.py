"""Shards a value, and puts shards together, as a `Sharding` says."""

from collections.abc import Sequence

import tensorflow as tf

from tfscale.variables.sharding import Sharding


def shard(value, sharding: Sharding, replica: int, rank: int) -> tf.Tensor:
    """The shard of a value on one device; without a gradient."""
    if not sharding.is_sharded:
        return value
    slices = sharding.slices(replica, rank)
    return tf.slice(value, [s.start for s in slices], sharding.local_shape)


def shards(value, sharding: Sharding) -> list[tf.Tensor]:
    """The shards of a value, in the order of `sharding.coordinates`.

    Each has its own buffer: a slice shares that of the value, and a variable
    that is created from a slice, and changed in place, would keep the whole.
    """
    made = {}
    for device in sharding.coordinates:
        key = _key(sharding, device)
        if key not in made:
            made[key] = shard(value, sharding, *device)
            if sharding.is_sharded:
                made[key] = tf.raw_ops.DeepCopy(x=made[key])
    return [made[_key(sharding, device)] for device in sharding.coordinates]


def unshard(shards: Sequence[tf.Tensor], sharding: Sharding) -> tf.Tensor:
    """The whole value, from shards in the order of `sharding.coordinates`."""
    count = sharding.num_ranks
    of_ranks = [
        _concat(shards[rank::count], sharding.data_dim) for rank in range(count)
    ]
    return _concat(of_ranks, sharding.model_dim)


def _key(sharding, device):
    return tuple((s.start, s.stop) for s in sharding.slices(*device))


def _concat(shards, dim):
    return shards[0] if dim is None else tf.concat(shards, axis=dim)
