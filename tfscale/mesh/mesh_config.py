"""The configuration of a `MeshStrategy`, which its components share."""

import dataclasses

from tfscale.collectives.workers import Workers
from tfscale.tensor_parallel.layouts.layouts import Layouts


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The configuration of a `MeshStrategy` in one worker; see its arguments.

    `devices[replica][pipeline_rank][model_rank]` are canonical names; `workers`
    is None if there is one process.
    """

    devices: tuple[tuple[tuple[str, ...], ...], ...]
    layouts: Layouts
    zero_stage: int
    sequence_parallel: bool
    offloads_slots: bool
    workers: Workers | None

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
