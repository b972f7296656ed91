"""Which mesh to train a model on, and why: plans, ranked."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import keras

from tfscale.formatting import print_table
from tfscale.formatting import table_length
from tfscale.integers import check_integer
from tfscale.mesh.device_mesh import device_mesh
from tfscale.mesh.speeds import given_speeds
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.model import PipelineModel
from tfscale.planner import report
from tfscale.planner.cost import Prediction
from tfscale.planner.device import Device
from tfscale.planner.device import get_device
from tfscale.planner.layers import ModelTable
from tfscale.planner.measure import measure_device
from tfscale.planner.search import divisors
from tfscale.planner.search import rank
from tfscale.planner.traced import trace_table
from tfscale.tensor_parallel.layouts.auto_layout import auto_layout_map

_LEAST_LENGTH = 100


def plan(
    build_model: Callable[[], keras.Model],
    *,
    num_devices: int,
    batch_size: int,
    device: str | Device = "measure",
    length: int | None = None,
    speeds: Sequence[float] | None = None,
) -> "Plans":
    """Ranks the ways to train a model on `num_devices` devices.

    Predicts time and memory of a step for each mesh of these devices, number
    of microbatches, schedule, recomputation, ZeRO stage and sequence
    parallelism, and leaves out plans that do not fit. Variables get no values,
    so that a model of any size can be planned on any machine.

    Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM"; Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models".

    Args:
        build_model: A function of no arguments that builds the model and does
            not compile it. A model with a `call` of its own cannot be cut. It
            is planned for the other axes, and the `notes` of the result say so.
        num_devices: Devices to use, all of them.
        batch_size: Examples of a step, over all replicas.
        device: `"A100"`, `"H100"`, `"H200"`, `"TPU v5e"`, `"TPU v6e"`, a
            `tfscale.planner.Device`, or `"measure"` for figures of this
            machine, which takes seconds.
        length: The size of each dim but the batch that inputs leave open, as
            backbones of keras_hub do: tokens of an example, or height and
            width of an image.
        speeds: How many times as fast as `device` each of the devices is, if
            they differ: see `tfscale.device_mesh`, whose `speeds` of a mesh
            these may be. Meshes then have several devices along one axis only,
            "data" or "pipeline".

    Returns:
        The `Plans`, the fastest first.

    Raises:
        TypeError: If `build_model` is not a function that returns a model, a
            number is not an integer, or `device` has another type.
        ValueError: If a number is less than 1, the model is not built, its
            inputs leave sizes open and there is no `length`,
            `build_model` compiles it or creates a variable of a value, no
            preset has that name, nothing divides the batch, or no plan fits:
            the message then says what the smallest needs.

    Example:

    >>> import keras
    >>> import tfscale
    >>> def build_model():
    ...     return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    >>> plans = tfscale.plan(
    ...     build_model, num_devices=2, batch_size=8, device="H100"
    ... )
    >>> plans.best.settings.num_devices
    2
    """
    check_integer("num_devices", num_devices)
    check_integer("batch_size", batch_size)
    if length is not None:
        check_integer("length", length)
    if speeds is not None:
        speeds = given_speeds(speeds, {"num_devices": num_devices})
    if isinstance(device, str) and device == "measure":
        device = measure_device(num_devices)
    device = get_device(device)
    # Sums over model ranks in every layer need the links of one machine.
    most = device.devices_per_machine
    ranks = [n for n in divisors(num_devices) if n <= most]
    table = trace_table(build_model, ranks, length)
    ranked = rank(table, num_devices, batch_size, device, speeds)
    names = [field.name for field in dataclasses.fields(Prediction)]
    plans = tuple(
        Plan(**{n: getattr(p, n) for n in names}, build_model=build_model)
        for p in ranked
    )
    return Plans(plans, table, batch_size, device)


@dataclasses.dataclass(frozen=True)
class Plan(Prediction):
    """One way to train a model, and its prediction.

    Args:
        settings: The choices: sizes of the axes, microbatches and so on.
        seconds: Seconds of a step, by cause.
        memory: Bytes of the fullest device, by kind.
        traffic: Bytes that a device sends in a step, by axis of the mesh.
        mfu: Model FLOPs utilization: the part of the devices' peak that the
            model uses; what is recomputed does not count.
        examples_per_second: Of all devices together.
        tokens_per_second: The same in tokens, or None.
        build_model: The function that builds the model.

    Example:

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> def build_model():
    ...     return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    >>> best = tfscale.plan(
    ...     build_model, num_devices=2, batch_size=8, device="H100"
    ... ).best
    >>> with best.strategy().scope():
    ...     model = best.wrap(build_model())
    ...     model.compile("adam", "mse")
    """

    build_model: Callable[[], keras.Model] = dataclasses.field(repr=False)

    def strategy(self) -> MeshStrategy:
        """The strategy, on the first devices of TensorFlow.

        Raises:
            ValueError: If TensorFlow has fewer than the plan is for.
        """
        s = self.settings
        mesh = device_mesh(
            data=s.data, pipeline=s.pipeline, model=s.model, speeds=s.speeds
        )
        return MeshStrategy(
            mesh,
            auto_layout_map(self.build_model, mesh) if s.model > 1 else None,
            zero_stage=s.zero_stage,
            sequence_parallel=s.sequence_parallel,
        )

    def wrap(self, model: keras.Model) -> keras.Model:
        """The model to compile: a `PipelineModel`, if the plan needs one.

        Args:
            model: The model that `build_model` built in the scope of
                `strategy()`.
        """
        s = self.settings
        if s.is_whole:
            return model
        return PipelineModel(
            model,
            num_microbatches=s.num_microbatches,
            schedule=s.schedule,
            recompute=s.recompute,
            stages_per_device=s.stages_per_device,
        )


class Plans(Sequence):
    """The result of `tfscale.plan`: a sequence of `Plan`, the fastest first.

    Args:
        plans: The plans.
        model_table: The layers of the model.
        batch_size: Examples of a step.
        device: The device that the plans are for.

    Attributes:
        best: The fastest plan.
        notes: What was not planned, and why.
        device: The device that the plans are for.

    >>> import keras
    >>> import tfscale
    >>> def build_model():
    ...     return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    >>> plans = tfscale.plan(
    ...     build_model, num_devices=2, batch_size=8, device="H100"
    ... )
    >>> len(plans) > 1, plans.best == plans[0]
    (True, True)
    """

    def __init__(
        self,
        plans: tuple[Plan, ...],
        model_table: ModelTable,
        batch_size: int,
        device: Device,
    ):
        self._plans = plans
        self.best = plans[0]
        self.notes = model_table.notes
        self.device = device
        self._unit = "Tokens" if model_table.tokens else "Examples"
        self._title = (
            f"{model_table.name} with {model_table.num_weights:,} weights, "
            f"batch size {batch_size}, {self.best.settings.num_devices} x "
            f"{device.name}"
        )

    def __getitem__(self, index):
        return self._plans[index]

    def __len__(self):
        return len(self._plans)

    def table(
        self,
        line_length: int | None = None,
        print_fn: Callable[[str], None] | None = None,
    ) -> None:
        """Prints the best plan of each mesh, and why it is slower.

        Args:
            line_length: See `keras.Model.summary`.
            print_fn: See `keras.Model.summary`.
        """
        length = table_length(line_length, _LEAST_LENGTH)
        print_table(
            f"[bold]Plans:[/] {self._title}",
            report.table(self, self._unit, length),
            report.lines(self, self.device, self.notes),
            length,
            print_fn,
        )

    def save_png(self, path: str) -> None:
        """Draws time against memory of all plans, and marks the frontier.

        Args:
            path: Where to write the picture.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        report.save_png(self, self.device, self._title, path)
