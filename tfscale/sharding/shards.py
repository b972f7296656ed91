"""Shards a value, and puts shards together, as a `Sharding` says."""

from collections.abc import Sequence

import tensorflow as tf

from tfscale.sharding.sharding import Sharding


def shard(value, sharding: Sharding, replica: int, rank: int) -> tf.Tensor:
    """What one device has of a value; no gradient is needed."""
    if not sharding.is_sharded:
        return value
    slices = sharding.slices(replica, rank)
    return tf.slice(value, [s.start for s in slices], sharding.local_shape)


def shards(value, sharding: Sharding) -> list[tf.Tensor]:
    """What each device has of a value, in the order of `sharding.coordinates`.

    In a buffer of its own: a slice shares that of the value, and a variable
    that is created from one, and then changed in place, would keep all.
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
    """The value that shards make up, in the order of `sharding.coordinates`."""
    count = sharding.num_ranks
    of_ranks = [
        _concat(shards[rank::count], sharding.data_dim) for rank in range(count)
    ]
    return _concat(of_ranks, sharding.model_dim)


def _key(sharding, device):
    """Equal for devices that have the same."""
    return tuple((s.start, s.stop) for s in sharding.slices(*device))


def _concat(shards, dim):
    return shards[0] if dim is None else tf.concat(shards, axis=dim)
