"""A `tf.distribute` strategy over a mesh: replicas are its data axis."""

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale.distribute.extended import MeshExtended
from tfscale.distribute.scope import Scope
from tfscale.mesh import AXES
from tfscale.tensor_parallel.layouts import Layouts


class MeshStrategy(tf.distribute.Strategy):
    """Trains over a mesh of devices, with `fit` or with `run` and `reduce`.

    The replicas of `tf.distribute` are the data axis of the mesh: the global
    batch is divided over them and `num_replicas_in_sync` is the size of that
    axis. Each replica has a row of stage devices of its own along the
    pipeline axis, which `tfscale.PipelineModel` cuts a model over. Along the
    model axis the layout map says which variables are divided; a layer runs
    on the parts where it can (Megatron-LM's column and row parallelism) and
    puts them together where it cannot, so that the numbers are always those
    of one device.

    Gradients of embeddings are dense here, with the rows that occur more than
    once in a batch added up, because Keras' optimizers on TensorFlow mistreat
    such rows otherwise.

    Args:
        mesh: A `keras.distribution.DeviceMesh` with the axes `"data"` and
            `"pipeline"` and `"model"` (see `tfscale.device_mesh`); an axis that
            is not there has size 1.
        layout_map: A `keras.distribution.LayoutMap`: which dimensions of which
            variables are divided over the axis `"model"`. Entries of other
            axes count as replicated. `tfscale.layers` need none.
        zero_stage: 0, or 1 to divide the slots of optimizers over the data
            axis. Each of D replicas then has 1 / D of a slot (a momentum, an
            average), along the first dim that D divides; it sums up its part
            of the gradients, updates its part of the weights, and gets the
            rest from the other replicas. What has no such dim stays whole.
        sequence_parallel: Whether activations are divided along the sequence,
            dim 1 of `(batch, sequence, features)`, where they would be the
            same on all model ranks: between a layer whose sum over ranks makes
            them and the next that is divided along its outputs. Without
            effect, and with a warning, for a sequence of a length that the
            ranks do not divide, and for models with a `call` of their own.

    Source of `sequence_parallel`: Korthikanti et al., Reducing Activation
    Recomputation in Large Transformer Models (2022), section 4.2.2.

    Source of `zero_stage`: Rajbhandari et al., ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models (2020), section 5.1.

    Raises:
        TypeError: If `mesh` is no `DeviceMesh`, `layout_map` no map, or
            `sequence_parallel` no bool.
        ValueError: If `zero_stage` is neither 0 nor 1, if the mesh has an axis
            of another name, or if it names a device twice or one that
            TensorFlow does not have. In the first run: if the `"model"` axis
            is larger than 1 and there is neither a `layout_map` nor a layer
            that divides its own variables.

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

    # Of the class, as in `MirroredStrategy`: keys of collectives start here.
    _collective_key_base = 0

    def __init__(
        self,
        mesh: keras.distribution.DeviceMesh,
        layout_map: keras.distribution.LayoutMap | None = None,
        *,
        zero_stage: int = 0,
        sequence_parallel: bool = False,
    ):
        if zero_stage not in (0, 1) or isinstance(zero_stage, bool):
            raise ValueError(
                "`zero_stage` must be 0 (each replica has all optimizer slots) "
                "or 1 (the replicas divide them). Received: "
                f"zero_stage={zero_stage!r}. Gradients and weights are not "
                "divided over replicas here; `tfscale.PipelineModel` and a "
                "layout map divide both over other axes."
            )
        if not isinstance(sequence_parallel, bool):
            raise TypeError(
                "`sequence_parallel` must be True or False. Received: "
                f"sequence_parallel={sequence_parallel!r}."
            )
        self._mesh = mesh
        self._device_grid = _device_grid(mesh)
        layouts = Layouts(layout_map, mesh)
        super().__init__(
            MeshExtended(
                self, self._device_grid, layouts, zero_stage, sequence_parallel
            )
        )

    def scope(self) -> Scope:
        """See `tf.distribute.Strategy.scope`.

        Raises:
            ValueError: When it is left, if something met in it that was made
                in it and something that was not.
        """
        return Scope(super().scope())

    @property
    def mesh(self) -> keras.distribution.DeviceMesh:
        """The mesh that the strategy was made for."""
        return self._mesh

    @property
    def device_grid(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Canonical device names.

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


def _device_grid(mesh):
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


def _canonical(name):
    """`"GPU:3"`, `"/gpu:3"` or a full name, as TensorFlow writes it."""
    if not name.startswith("/"):
        name = f"/device:{name}"
    return _internals.device_util.resolve(name)
