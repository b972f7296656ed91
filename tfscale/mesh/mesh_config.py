"""The configuration of a `MeshStrategy`: its grid of devices, and arguments."""

import dataclasses

import keras
import tensorflow as tf

from tfscale.collectives import device_names
from tfscale.collectives.workers import Workers
from tfscale.mesh.device_mesh import AXES
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


def speeds_of(mesh: keras.distribution.DeviceMesh) -> tuple[float, ...] | None:
    """The speeds of a mesh's devices, or None if none or all are the same."""
    speeds = getattr(mesh, "speeds", None)
    return speeds if speeds and len(set(speeds)) > 1 else None


def device_grid(
    mesh: keras.distribution.DeviceMesh,
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Canonical device names, `grid[replica][pipeline_rank][model_rank]`.

    Raises a TypeError if `mesh` is no `DeviceMesh`, and a ValueError for a
    wrong axis or device.
    """
    if not isinstance(mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"{mesh!r}. Make one with "
            "`tfscale.device_mesh(data=..., pipeline=...)`."
        )
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(
            "The axes of a mesh must be among "
            f"{', '.join(map(repr, AXES))}. Received: axis_names="
            f"{list(mesh.axis_names)}. Rename {unknown[0]!r}."
        )
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    present = [axis for axis in AXES if axis in sizes]
    devices = mesh.devices.transpose(
        [mesh.axis_names.index(axis) for axis in present]
    ).reshape([sizes.get(axis, 1) for axis in AXES])
    grid = tuple(
        tuple(
            tuple(_canonical(str(name)) for name in ranks) for ranks in stages
        )
        for stages in devices
    )
    named = [name for stages in grid for ranks in stages for name in ranks]
    known = {_canonical(d.name) for d in tf.config.list_logical_devices()}
    for name in named:
        if name not in known:
            raise ValueError(
                "The devices of a mesh must be logical devices of TensorFlow. "
                f"Received: {name}, but there are {', '.join(sorted(known))}. "
                "Name one of these, or call `tfscale.use_virtual_devices` or "
                "`tf.config.experimental_connect_to_cluster` first."
            )
        if named.count(name) > 1:
            raise ValueError(
                "A mesh must name each device once. Received: "
                f"{name} {named.count(name)} times. Use as many devices as "
                "the product of the axes."
            )
    return grid


def rows_of_worker(
    grid: tuple[tuple[tuple[str, ...], ...], ...], worker: int, count: int
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The rows of one worker in a device grid, or a ValueError."""
    homes = []
    for stages in grid:
        tasks = sorted({_task(name) for ranks in stages for name in ranks})
        if len(tasks) > 1:
            raise ValueError(
                "Each worker must have whole rows of a mesh: all stages and "
                "model ranks of a replica. Received: a replica with devices "
                f"of {' and '.join(map(_named, tasks))}. Make the data axis a "
                "multiple of the number of workers. A row over several "
                "machines needs `tfscale.initialize(coordinator=True)`."
            )
        homes += tasks
    tasks = sorted(set(homes))
    each = len(homes) // count
    if homes != [task for task in tasks for _ in range(each)]:
        counts = {_named(task): homes.count(task) for task in tasks}
        raise ValueError(
            "Each worker must have the same number of rows of a mesh, one "
            f"worker after the other. Received: {counts}, of {count} workers. "
            "Omit `devices` of `device_mesh`."
        )
    return grid[worker * each : (worker + 1) * each]


def _task(name):
    spec = tf.DeviceSpec.from_string(name)
    return spec.job, spec.task


def _named(task):
    return f"{task[0]} {task[1]}"


def _canonical(name):
    """`"GPU:3"`, `"/gpu:3"` or a full name, as TensorFlow writes it."""
    if not name.startswith("/"):
        name = f"/device:{name}"
    return device_names.full_name(name)
