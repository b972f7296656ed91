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
    """What each device has of a value, in the order of `sharding.places`.

    In a buffer of its own: a slice shares that of the value, and a variable
    that is created from one, and then changed in place, would keep all.
    """
    made = {}
    for place in sharding.places:
        key = _key(sharding, place)
        if key not in made:
            made[key] = shard(value, sharding, *place)
            if sharding.is_sharded:
                made[key] = tf.raw_ops.DeepCopy(x=made[key])
    return [made[_key(sharding, place)] for place in sharding.places]


def unshard(shards: Sequence[tf.Tensor], sharding: Sharding) -> tf.Tensor:
    """The value that shards make up, in the order of `sharding.places`."""
    count = sharding.num_ranks
    of_ranks = [
        _concat(shards[rank::count], sharding.data_dim) for rank in range(count)
    ]
    return _concat(of_ranks, sharding.model_dim)


def _key(sharding, place):
    """Equal for devices that have the same."""
    return tuple((s.start, s.stop) for s in sharding.slices(*place))


def _concat(parts, dim):
    return parts[0] if dim is None else tf.concat(parts, axis=dim)
