"""A `tf.distribute` strategy over a mesh: replicas are its data axis."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import fitting
from tfscale._internals import symbols
from tfscale.adapters.compiled_model import adapt_compiled_model
from tfscale.adapters.shared_model import adapt_shared_model
from tfscale.adapters.shared_model import can_share
from tfscale.cluster import cluster_from_environment
from tfscale.cluster.initialize import coordinated
from tfscale.collectives.workers import workers
from tfscale.context import step_context
from tfscale.mesh.extended import MeshExtended
from tfscale.mesh.inputs.mesh_dataset import MeshDataset
from tfscale.mesh.inputs.mesh_dataset import MeshDatasetFromFunction
from tfscale.mesh.mesh_config import MeshConfig
from tfscale.mesh.mesh_config import device_grid
from tfscale.mesh.mesh_config import rows_of_worker
from tfscale.mesh.mesh_config import speeds_of
from tfscale.mesh.models import without_call
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.mesh.scope import Scope
from tfscale.tensor_parallel.layouts.layouts import Layouts


class MeshStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains over a mesh of devices, with `fit` or with `run` and `reduce`.

    The replicas of `tf.distribute` are the data axis of the mesh: the global
    batch is divided over them and `num_replicas_in_sync` is the size of that
    axis. Each replica has a row of stage devices of its own along the
    pipeline axis, which `tfscale.PipelineModel` cuts a model over. Along the
    model axis the layout map says which variables are sharded; a layer runs
    on the parts where it can (Megatron-LM's column and row parallelism) and
    puts them together where it cannot, so that the numbers are always those
    of one device.

    After `tfscale.initialize` the data axis spans the workers: each runs the
    same program and has the same number of whole rows of the mesh. Initial
    values are those of worker 0; gradients, losses, metrics and statistics are
    those of all workers. Its parent is TensorFlow's strategy over workers,
    which Keras checks for.

    Gradients of embeddings are dense, with repeated rows of a batch summed:
    Keras' optimizers on TensorFlow are wrong for sparse repeated rows.

    Args:
        mesh: A `keras.distribution.DeviceMesh` with the axes `"data"` and
            `"pipeline"` and `"model"` (see `tfscale.device_mesh`); an axis that
            is not there has size 1.
        layout_map: A `keras.distribution.LayoutMap`: the dimensions of
            variables that are sharded over the axis `"model"`. Entries of other
            axes count as replicated. `tfscale.layers` need none.
        zero_stage: 0, 1 to divide the slots of optimizers over the data axis,
            2 to divide accumulated gradients too, or 3 to divide weights too.
            In stage 1 each of D replicas has 1 / D of a slot (a momentum, an
            average), along the first dim that D divides; it sums up its part
            of the gradients, updates its part of the weights, and gets the
            rest from the other replicas. In stage 2 it also has 1 / D of the
            sums that `GradientAccumulation` keeps; without it stage 2 is
            stage 1. In stage 3 it also has 1 / D of the weights of at least
            4096 elements: they are gathered where they are read, in the forward
            and again in the backward, and their gradients are
            reduce-scattered; smaller ones stay whole, with their slots. A
            layout that names `"data"` chooses the dim. A variable with no such
            dim stays whole. Over several workers each divides over its own
            replicas.
        sequence_parallel: Whether activations are sharded along the sequence,
            dim 1 of `(batch, sequence, features)`, where they would be the
            same on all model ranks: between a layer whose sum over ranks makes
            them and the next that is sharded along its outputs. Without
            effect, and with a warning, for a sequence of a length that the
            ranks do not divide, and for models with a `call` of their own.
        offload: None, or `"slots"` to have the slots of optimizers on the host
            of each device (the first CPU of its task) and to update there:
            the gradient goes down and the change of the weight goes up, 8
            bytes for each float32 weight and step. It goes with any
            `zero_stage` and any axis; with stage 0 the host has each slot
            once for each replica. Not tried on a GPU yet; on CPUs it saves
            nothing.

    Source of `sequence_parallel`: Korthikanti et al., Reducing Activation
    Recomputation in Large Transformer Models (2022), section 4.2.2.

    Source of `offload`: Ren et al., ZeRO-Offload (2021), section 3.

    Source of `zero_stage`: Rajbhandari et al., ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models (2020), sections 5.1 and 5.3.

    Raises:
        TypeError: If `mesh` is no `DeviceMesh`, `layout_map` no map, or
            `sequence_parallel` no bool.
        ValueError: If `zero_stage` is none of 0 to 3, or 3 with one
            replica or stages, if `offload` is neither None nor "slots", if the
            mesh has an axis of another name, or if
            it names a device twice or one that TensorFlow does not have. In
            the first run: if the `"model"` axis is larger than 1 and there is
            neither a `layout_map` nor a layer that divides its own variables,
            or if no weight is divided with `zero_stage=3`.

    Example: a plain model, on two replicas.

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> strategy = tfscale.MeshStrategy(tfscale.device_mesh(data=2))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        mesh: keras.distribution.DeviceMesh,
        layout_map: keras.distribution.LayoutMap | None = None,
        *,
        zero_stage: int = 0,
        sequence_parallel: bool = False,
        offload: str | None = None,
    ):
        _check_zero_stage(zero_stage)
        _check_offload(offload)
        if not isinstance(sequence_parallel, bool):
            raise TypeError(
                "`sequence_parallel` must be True or False. Received: "
                f"sequence_parallel={sequence_parallel!r}."
            )
        self._mesh = mesh
        found = workers()
        grid = device_grid(mesh)
        if found is None:
            _check_is_alone()
        else:
            grid = rows_of_worker(grid, found.index, found.count)
            fact = f"{dict(zip(mesh.axis_names, mesh.shape))}, {zero_stage=}"
            found.coordination.check_same(
                "mesh",
                f"{fact}, {sequence_parallel=}, {offload=}, "
                f"speeds={speeds_of(mesh)}",
            )
        self._device_grid = grid
        if zero_stage == 3:
            _check_divides_weights(mesh, grid)
        layouts = Layouts(layout_map, mesh, zero_stage == 3)
        config = MeshConfig(
            grid,
            layouts,
            zero_stage,
            sequence_parallel,
            offload == "slots",
            found,
            speeds_of(mesh),
        )
        # The parent's constructor would join a cluster again.
        tf.distribute.Strategy.__init__(self, MeshExtended(self, config))

    @property
    def experimental_distribute_dataset(self) -> Callable[..., MeshDataset]:
        """See `tf.distribute.Strategy.experimental_distribute_dataset`."""
        return self.extended.inputs.of_dataset

    @property
    def distribute_datasets_from_function(
        self,
    ) -> Callable[..., MeshDatasetFromFunction]:
        """See `tf.distribute.Strategy.distribute_datasets_from_function`."""
        return self.extended.inputs.from_function

    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        axis: int | None,
    ) -> tf.Tensor:
        """See `tf.distribute.Strategy.reduce`.

        Keras asks for the mean of its logs, scalars, along their first dim.
        """
        extended = self.extended
        local_results = self.experimental_local_results(value)
        if (
            axis == 0
            and extended.workers is not None
            and all(
                len(tf.convert_to_tensor(x).shape) == 0 for x in local_results
            )
        ):
            axis = None
        return super().reduce(reduce_op, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """See `tf.distribute.Strategy`; of model ranks the first one's."""
        value = tf.nest.map_structure(self.extended.of_first_ranks, value)
        # A merge call has a device for each rank.
        with step_context.within_ranks(devices=None):
            return super().experimental_local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[Any], Any]
    ) -> tf.distribute.DistributedValues:
        """See `tf.distribute.Strategy`; called for this worker's replicas.

        TensorFlow's, made for one process, calls it for those of all workers.
        """
        count, found = self.extended.num_replicas, self.extended.workers
        before = 0 if found is None else found.index * count
        values = [
            value_fn(
                tf.distribute.experimental.ValueContext(
                    before + index, self.num_replicas_in_sync
                )
            )
            for index in range(count)
        ]
        return symbols.distribute_utils.regroup(tuple(values), always_wrap=True)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files that are written once.

        True for worker 0, and for a single process.
        """
        workers = self.extended.workers
        return workers is None or workers.index == 0

    def scope(self) -> Scope:
        """See `tf.distribute.Strategy.scope`.

        Raises:
            ValueError: When it is left, if something met in it that was made
                in it and something that was not.
        """
        call, model = fitting.keras_call(), None
        if call is not None and call.stage == "probe":
            model = call.model
            if not model.built:
                without_call.build(model)
            if self._is_compiled_in_clusters(model):
                adapt_compiled_model(model)
            elif can_share(self.extended, model):
                adapt_shared_model(model)
        return Scope(super().scope(), model)

    def _is_compiled_in_clusters(self, model):
        # A pipeline compiles its stages; for one device Keras compiles it all.
        extended = self.extended
        return (
            model.jit_compile
            and not isinstance(model, WrappedModel)
            and extended.is_of_several_devices
        )

    @property
    def mesh(self) -> keras.distribution.DeviceMesh:
        """The mesh of the strategy, with all workers' rows."""
        return self._mesh

    @property
    def device_grid(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Canonical device names, of this worker's replicas.

        They are `device_grid[replica][pipeline_rank][model_rank]`.
        """
        return self._device_grid

    @property
    def device_rows(self) -> tuple[tuple[str, ...], ...]:
        """Canonical names of the first model ranks' devices.

        They are `device_rows[replica][pipeline_rank]`.
        """
        return tuple(
            tuple(ranks[0] for ranks in stages) for stages in self._device_grid
        )


def _check_zero_stage(zero_stage):
    if type(zero_stage) is int and zero_stage in (0, 1, 2, 3):
        return
    raise ValueError(
        "`zero_stage` must be 0 (each replica has everything), or 1 (the "
        "replicas divide optimizer slots), or 2 (accumulated gradients too), "
        f"or 3 (weights too). Received: zero_stage={zero_stage!r}."
    )


def _check_offload(offload):
    if offload is None or (isinstance(offload, str) and offload == "slots"):
        return
    raise ValueError(
        "`offload` must be None, or 'slots', which puts optimizer slots on "
        f"the host. Received: offload={offload!r}. Weights and activations "
        "stay on their devices: divide weights by zero_stage=3 or a "
        "'pipeline' axis, and reduce activations by GradientAccumulation or "
        "recomputation."
    )


def _check_divides_weights(mesh, grid):
    num_stages, num_replicas = len(grid[0]), len(grid)
    if num_stages > 1:
        raise ValueError(
            "zero_stage=3 needs a mesh without a 'pipeline' axis: all "
            "microbatches of a stage use its weights, so gathered ones would "
            "be kept along with their shards, which takes more memory than "
            f"zero_stage=1. Received: zero_stage=3 with pipeline={num_stages}. "
            "Use zero_stage=1."
        )
    if num_replicas == 1:
        where = "" if mesh.shape[0] == 1 else " in each worker"
        raise ValueError(
            "zero_stage=3 divides weights over the replicas of a process. "
            f"Received: one replica{where}. Make a mesh with data=2 or more "
            "for each process, or use zero_stage=0."
        )


def _check_is_alone():
    cluster = cluster_from_environment()
    if coordinated() or cluster is None or len(cluster.addresses) == 1:
        return
    raise ValueError(
        "A process of a cluster must join the others. Received: a "
        f"MeshStrategy in a cluster of {len(cluster.addresses)} processes, "
        "which was not joined: each would train by itself. Call "
        "`tfscale.initialize()` right after the imports, or remove TF_CONFIG "
        "(or whatever else defines the cluster) from the environment."
    )
