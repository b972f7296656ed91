"""How a variable is sharded over the devices of a mesh, in integers."""

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The shard of a variable on each replica and model rank.

    The model ranks of a replica divide a variable along one dim; where replicas
    shard optimizer states (ZeRO), they divide a rank's shard again along a dim:

        device    replica 0, rank 0   replica 0, rank 1   replica 1, rank 0
        has       part 0 of shard 0   part 0 of shard 1   part 1 of shard 0

    A variable that is not sharded has a `Sharding` too.

    Attributes:
        shape: Of the whole variable.
        itemsize: Bytes of an element.
        num_replicas: Size of the data axis.
        num_ranks: Size of the model axis.
        model_dim: The dim that the model axis divides, or None.
        data_dim: The dim that the data axis divides, or None.

    Example:

    >>> kernel = Sharding((8, 6), 4, num_replicas=2, num_ranks=3, model_dim=1)
    >>> kernel.local_shape, kernel.local_bytes
    ((8, 2), 64)
    >>> momentum = kernel.over_data()
    >>> momentum.local_shape, momentum.slices(replica=1, rank=2)
    ((4, 2), (slice(4, 8, None), slice(4, 6, None)))
    """

    shape: tuple[int, ...]
    itemsize: int
    num_replicas: int = 1
    num_ranks: int = 1
    model_dim: int | None = None
    data_dim: int | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether a device has less than the whole variable."""
        return self.model_dim is not None or self.data_dim is not None

    @property
    def coordinates(self) -> Iterator[tuple[int, int]]:
        """`(replica, rank)` of each device, in the order of components."""
        for replica in range(self.num_replicas):
            for rank in range(self.num_ranks):
                yield replica, rank

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape that a model rank has, all replicas together."""
        return _sharded(self.shape, self.model_dim, self.num_ranks)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that a device has."""
        return _sharded(self.shard_shape, self.data_dim, self.num_replicas)

    @property
    def num_bytes(self) -> int:
        """Of the whole variable."""
        return math.prod(self.shape) * self.itemsize

    @property
    def shard_bytes(self) -> int:
        """Of what a model rank has, all replicas together."""
        return math.prod(self.shard_shape) * self.itemsize

    @property
    def local_bytes(self) -> int:
        """Of what a device has."""
        return math.prod(self.local_shape) * self.itemsize

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The axis of the mesh that divides each dim, or both: "model+data"."""
        dims = {"model": self.model_dim, "data": self.data_dim}
        return tuple(
            "+".join(axis for axis in dims if dims[axis] == dim) or None
            for dim in range(len(self.shape))
        )

    def slices(self, replica: int, rank: int) -> tuple[slice, ...]:
        """The slice of each dim that a device has."""
        starts = self.begin_in_shard(replica)
        if self.model_dim is not None:
            starts[self.model_dim] += rank * self.shard_shape[self.model_dim]
        return tuple(
            slice(start, start + size)
            for start, size in zip(starts, self.local_shape)
        )

    def begin_in_shard(self, replica: int) -> list[int]:
        """Where a replica's part begins in the shard of its model rank."""
        begin = [0] * len(self.shape)
        if self.data_dim is not None:
            begin[self.data_dim] = replica * self.local_shape[self.data_dim]
        return begin

    def over_data(self) -> "Sharding":
        """The same sharding, also over the data axis, as for optimizer states.

        Along the first dim that the replicas divide, whose slices lie together
        in memory as far as that goes; unchanged if there is none, or if the
        replicas divide it already.
        """
        if self.data_dim is not None:
            return self
        for dim, size in enumerate(self.shard_shape):
            if size and size % self.num_replicas == 0 and self.num_replicas > 1:
                return dataclasses.replace(self, data_dim=dim)
        return self


def _sharded(shape, dim, count):
    if dim is None:
        return shape
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
