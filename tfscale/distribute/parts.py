"""How the components of a variable make up its value."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Parts:
    """What each replica and model rank has of a value.

    The model ranks of a replica divide the value along one dim; what a rank
    has, its shard, the replicas divide along one of its own dims:

        component   replica 0, rank 0   replica 0, rank 1   replica 1, rank 0
        has         part 0 of shard 0   part 0 of shard 1   part 1 of shard 0

    Attributes:
        num_replicas: Number of replicas.
        num_ranks: Number of model ranks of each replica.
        rank_dim: Which dim of the value the ranks divide, or None.
        replica_dim: Which dim of a shard the replicas divide, or None.
    """

    num_replicas: int
    num_ranks: int
    rank_dim: int | None = None
    replica_dim: int | None = None

    def whole_shape(self, shape) -> tf.TensorShape:
        """The shape of the value, of which components have `shape`."""
        sizes = list(shape)
        if self.rank_dim is not None:
            sizes[self.rank_dim] *= self.num_ranks
        if self.replica_dim is not None:
            sizes[self.replica_dim] *= self.num_replicas
        return tf.TensorShape(sizes)

    def split(self, value) -> list[tf.Tensor]:
        """What each component has of a value, replica by replica."""
        shards = _split(value, self.rank_dim, self.num_ranks)
        of_ranks = [
            _split(shard, self.replica_dim, self.num_replicas)
            for shard in shards
        ]
        return [
            of_ranks[rank][replica]
            for replica in range(self.num_replicas)
            for rank in range(self.num_ranks)
        ]

    def join(self, components) -> tf.Tensor:
        """The value that components make up."""
        shards = [
            _concat(components[rank :: self.num_ranks], self.replica_dim)
            for rank in range(self.num_ranks)
        ]
        return _concat(shards, self.rank_dim)


def _split(value, dim, count):
    return [value] * count if dim is None else tf.split(value, count, axis=dim)


def _concat(parts, dim):
    return parts[0] if dim is None else tf.concat(parts, axis=dim)
