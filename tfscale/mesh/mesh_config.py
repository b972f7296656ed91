"""The configuration of a `MeshStrategy`, which its components share."""

import dataclasses

from tfscale.collectives.workers import Workers
from tfscale.tensor_parallel.layouts.layouts import Layouts


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The configuration of a `MeshStrategy` in one worker; see its arguments.

    `devices[replica][pipeline_rank][model_rank]` are canonical names; `workers`
    is None if there is one process, and `speeds` are those of all workers'
    devices, or None if they are equal.
    """

    devices: tuple[tuple[tuple[str, ...], ...], ...]
    layouts: Layouts
    zero_stage: int
    sequence_parallel: bool
    offloads_slots: bool
    workers: Workers | None
    speeds: tuple[float, ...] | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas of this worker."""
        return len(self.devices)

    @property
    def num_stages(self) -> int:
        """Number of stages of each replica."""
        return len(self.devices[0])

    @property
    def num_model_ranks(self) -> int:
        """Number of model ranks of each replica."""
        return len(self.devices[0][0])

    @property
    def first_stage_devices(self) -> tuple[str, ...]:
        """The first stage's devices, of all model ranks of all replicas."""
        return tuple(device for stages in self.devices for device in stages[0])

    @property
    def stage_speeds(self) -> tuple[float, ...] | None:
        """The speed of each device along the pipeline axis, or None."""
        return self.speeds if self.num_stages > 1 else None

    @property
    def shard_speeds(self) -> tuple[float, ...] | None:
        """The speeds of the replicas that have the shards of a batch, or None.

        In the order in which Keras concatenates shards: those of the first
        replica of each worker, then of the second.
        """
        if self.speeds is None or self.num_stages > 1:
            return None
        each = self.num_replicas
        return tuple(s for r in range(each) for s in self.speeds[r::each])

    @property
    def local_shards(self) -> range:
        """The shards of a batch that this worker's replicas have."""
        if self.workers is None:
            return range(self.num_replicas)
        count = self.workers.count
        return range(self.workers.index, self.num_replicas * count, count)
