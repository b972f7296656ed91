"""All plans for a number of devices, ranked by the time of a step."""

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence

from tfscale.formatting import readable_bytes
from tfscale.planner.cost import Prediction
from tfscale.planner.cost import Predictor
from tfscale.planner.cost import Settings
from tfscale.planner.device import Device
from tfscale.planner.layers import ModelTable

# Names, and stages of a device. Each other schedule with up to two stages takes
# as long as one of these, and holds no less.
_SCHEDULES = (
    *(("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)),
    *(("interleaved", 2), ("interleaved", 4)),
)


def rank(
    table: ModelTable,
    num_devices: int,
    batch_size: int,
    device: Device,
    speeds: tuple[float, ...] | None = None,
) -> list[Prediction]:
    """All plans that fit, the fastest first, and among equals the simplest.

    With `speeds` of the devices, meshes have several along one axis only.
    A `ValueError` says so if nothing divides the batch, or nothing fits.
    """
    settings = _settings(table, num_devices, batch_size, device)
    if speeds is not None:
        settings = (
            dataclasses.replace(each, speeds=speeds)
            for each in settings
            if num_devices in (each.data, each.pipeline)
        )
    predict = Predictor(table, batch_size, device).predict
    found = list(map(predict, settings))
    if not found:
        raise _indivisible(table, num_devices, batch_size)
    fitting = [p for p in found if p.num_bytes <= device.usable_memory]
    if not fitting:
        raise _too_large(found, table, batch_size, device)
    return sorted(
        fitting, key=lambda p: (p.step_seconds, len(p.settings.changed()))
    )


def best_of_each_mesh(ranked: Sequence[Prediction]) -> list[Prediction]:
    """The first plan of each mesh."""
    best: dict[str, Prediction] = {}
    for p in ranked:
        best.setdefault(p.settings.mesh, p)
    return list(best.values())


def frontier(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Predictions that none is both faster and smaller than, fastest first."""
    found: list[Prediction] = []
    for p in sorted(predictions, key=lambda p: (p.step_seconds, p.num_bytes)):
        if not found or p.num_bytes < found[-1].num_bytes:
            found.append(p)
    return found


def why_slower(prediction: Prediction, than: Prediction) -> str:
    """The cause that adds most to a step, compared with a faster plan."""
    more = {
        cause: prediction.seconds[cause] - than.seconds[cause]
        for cause in prediction.seconds
    }
    cause = max(more, key=more.__getitem__)
    if more[cause] <= 0:
        return ""
    return f"{cause} +{100 * more[cause] / than.step_seconds:.1f} %"


def _settings(table, num_devices, batch_size, device) -> Iterator[Settings]:
    recomputes = (False, True) if table.can_be_cut else (False,)
    for mesh in _meshes(table, num_devices):
        if batch_size % mesh.data:
            continue
        layers = table.by_ranks[mesh.model]
        rows = batch_size // mesh.data
        in_machine = device.devices_per_machine // (mesh.pipeline * mesh.model)
        has_shards = mesh.data > 1 and in_machine > 1
        has_sequence = any(layer.undivided for layer in layers)
        for m in divisors(rows) if table.can_be_cut else (1,):
            # Stage 3 would gather weights again for each microbatch.
            is_whole = mesh.pipeline == m == 1
            zero_stages = (0, 1, 3) if is_whole else (0, 1)
            # The other schedules need a multiple of the stages in microbatches.
            in_rounds = mesh.pipeline > 1 and m % mesh.pipeline == 0
            for (name, chunks), recompute, zero, sequence in itertools.product(
                _SCHEDULES if in_rounds else _SCHEDULES[:1],
                recomputes,
                zero_stages if has_shards else (0,),
                (False, True) if has_sequence else (False,),
            ):
                if mesh.pipeline * chunks <= len(layers):
                    yield dataclasses.replace(
                        mesh,
                        num_microbatches=m,
                        schedule=name,
                        stages_per_device=chunks,
                        recompute=recompute,
                        zero_stage=zero,
                        sequence_parallel=sequence,
                    )


def _meshes(table, num_devices) -> Iterator[Settings]:
    for ranks, layers in table.by_ranks.items():
        most = sum(layer.forward.products > 0 for layer in layers)
        most = most if table.can_be_cut else 1
        for pipeline in divisors(num_devices):
            data, rest = divmod(num_devices, ranks * pipeline)
            if not rest and pipeline <= max(most, 1):
                yield Settings(data, pipeline, ranks)


def _indivisible(table, num_devices, batch_size):
    replicas = sorted({mesh.data for mesh in _meshes(table, num_devices)})
    sizes = {n * (batch_size // n) for n in replicas}
    sizes |= {n * (batch_size // n + 1) for n in replicas}
    near = sorted(sizes - {0}, key=lambda size: abs(size - batch_size))[:2]
    return ValueError(
        "The number of replicas must divide the batch size. Received: "
        f"batch_size={batch_size} for {num_devices} devices, on which this "
        f"model can have {' or '.join(map(str, replicas))} replicas. Use "
        f"batch_size={' or '.join(map(str, near))}, or another num_devices. "
        + " ".join(table.notes)
    )


def _too_large(found, table, batch_size, device):
    least = min(found, key=lambda p: p.num_bytes)
    kinds = ", ".join(
        f"{kind} {readable_bytes(size)}" for kind, size in least.memory.items()
    )
    return ValueError(
        "A plan must fit into 90 % of a device's memory. Received: "
        f"{table.name!r} with {table.num_weights:,} weights, "
        f"batch_size={batch_size}, and {least.settings.num_devices} x "
        f"{device.name} of {readable_bytes(device.memory)}. The smallest plan "
        f"({least.settings}) needs {readable_bytes(least.num_bytes)}: {kinds}. "
        "Use more or larger devices, or a smaller batch."
    )


def divisors(number: int) -> list[int]:
    """All numbers that divide `number`, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
