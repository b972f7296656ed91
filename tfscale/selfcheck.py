"""Checks of the devices of this machine, as one table.

    python -m tfscale.selfcheck
    python -m tfscale.selfcheck --json
    python -m tfscale.selfcheck --model=train:build_model --data=train:dataset

Trains a small model for three steps on every kind of mesh and by every schedule
and compares its losses and weights with those of one device; measures matrix
products, copies, links, and on GPUs what XLA gains. The devices are the GPUs;
or one of them, or the CPU, split into logical devices. Nothing is changed
outside of the process. It takes one to two minutes on CPUs; on GPUs no check
begins after 90 seconds, or those of `--seconds`; the exit code is 1 if
something failed. With `--model` it trains yours instead, by `tfscale.compare`
on every kind of mesh: a function of no arguments that returns a compiled model,
on a dataset, or a function that returns one.
"""

import argparse
import dataclasses
import functools
import json
import os
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import tfscale
from tfscale.planner.measure import measure_device
from tfscale.schedules.named_schedules import SCHEDULES

_NUM_STEPS, _BATCH_SIZE, _LENGTH, _WIDTH = 3, 16, 8, 32
_TOLERANCE = 1e-4  # of the largest magnitude in a tensor of float32
_LOGICAL_DEVICES, _MOST_DEVICES, _MOST_STAGES = 4, 8, 4
_LOGICAL_GPU_MIB = 2048
# Two minutes with the last check, and what comes before the first.
_SECONDS_ON_GPUS = 90.0
# Of the model with which XLA is measured: a step of some 10 ms on a GPU, in
# less than 2 GiB.
_XLA_WIDTH, _XLA_LENGTH, _XLA_ROWS = 1024, 256, 8
_FLAG_OF_CPUS = "--tf_xla_cpu_global_jit"
_XLA_WARM_UP, _XLA_STEPS = 3, 15


class NotHereError(Exception):
    """Something cannot be tried on these devices."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check."""

    name: str
    status: str  # "works", "differs", "fails", "not here" or "not tried"
    # From the numbers of one device, of the largest magnitude in a tensor.
    difference: float | None = None
    seconds: float | None = None
    why: str = ""  # it fails, or is not here


def cases(num_devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of `train` for every kind of mesh and every schedule."""
    data = {"data": num_devices}
    model = {"data": num_devices // 2, "model": 2}
    stages = min(num_devices, _MOST_STAGES)
    pipeline = {"data": num_devices // stages, "pipeline": stages}
    both = {"data": num_devices // 4, "pipeline": 2, "model": 2}
    meshes: dict[str, dict[str, Any]] = {
        "data": {"mesh": data},
        "data, zero_stage=3": {"mesh": data, "zero_stage": 3},
        "model": {"mesh": model},
        "pipeline": {"mesh": pipeline, "pipeline": {}},
        "all axes": {"mesh": both, "pipeline": {}},
        "model, sequence_parallel": {"mesh": model, "sequence_parallel": True},
        "data, offload='slots'": {"mesh": data, "offload": "slots"},
        "data, zero_stage=1": {"mesh": data, "zero_stage": 1},
        "data, zero_stage=2": {"mesh": data, "zero_stage": 2},
    }
    if num_devices < 4:
        del meshes["all axes"]
    yield from meshes.items()
    # The time may be up before the last ones.
    for name, options in meshes.items():
        yield f"{name}, XLA", {**options, "jit": True}
    # A window of one batch of PipeDream is one device.
    for schedule in (*SCHEDULES, "auto", "pipedream"):
        yield (
            f"pipeline, {schedule}",
            {"mesh": pipeline, "pipeline": {"schedule": schedule}},
        )
    recompute = {"recompute": True}
    yield "pipeline, recompute", {"mesh": pipeline, "pipeline": recompute}


def build_model(length: int = _LENGTH, width: int = _WIDTH) -> keras.Model:
    """Residual blocks of two layers that model ranks can divide."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((length, width))
    for _ in range(_MOST_STAGES):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    return keras.Model(inputs, x, name="blocks")


def measure_xla(num_devices: int) -> dict[str, float]:
    """Seconds of a step on replicas with XLA and without.

    The third number is the largest difference of losses, of the largest loss.
    """
    rows = _XLA_ROWS * num_devices
    x = np.random.default_rng(0).normal(size=(rows, _XLA_LENGTH, _XLA_WIDTH))
    x = x.astype("float32")
    seconds, losses = [], []
    for jit_compile in (True, False):
        keras.utils.clear_session()
        mesh = tfscale.device_mesh(data=num_devices)
        with tfscale.MeshStrategy(mesh).scope():
            model = build_model(_XLA_LENGTH, _XLA_WIDTH)
            sgd = keras.optimizers.SGD(0.05, momentum=0.9)
            model.compile(sgd, "mse", jit_compile=jit_compile)
        times, found = [], []
        for _ in range(_XLA_WARM_UP + _XLA_STEPS):
            begin = time.perf_counter()
            found.append(float(model.train_on_batch(x, x[:, ::-1])))
            times.append(time.perf_counter() - begin)
        seconds.append(statistics.median(times[_XLA_WARM_UP:]))
        losses.append(np.array(found))
    return {
        "compiled": seconds[0],
        "uncompiled": seconds[1],
        "difference": _difference(losses[:1], losses[1:]),
    }


def train(
    mesh: dict[str, Any] | None = None,
    *,
    pipeline: dict[str, Any] | None = None,
    jit: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """Losses of three steps, and the weights after them.

    On a mesh of axes of these sizes, or on one device; `pipeline` are arguments
    of a `PipelineModel`, `options` of the `MeshStrategy`.
    """
    strategy: tf.distribute.Strategy = tf.distribute.get_strategy()
    if mesh is not None:
        # Stages are compiled as functions.
        if jit and (pipeline is None or "model" in mesh):
            _check_clusters()
        strategy = _strategy(build_model, mesh, options)
    with strategy.scope():
        model = trained = build_model()
        if pipeline is not None:
            trained = tfscale.PipelineModel(
                model, num_microbatches=2 * _MOST_STAGES, **pipeline
            )
        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        trained.compile(sgd, "mse", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE, _LENGTH, _WIDTH))
    x = x.astype("float32")
    history = trained.fit(
        x, x[:, ::-1], batch_size=_BATCH_SIZE, epochs=_NUM_STEPS, verbose=0
    )
    return [np.array(history.history["loss"]), *model.get_weights()]


def _check_clusters():
    if tf.config.list_logical_devices("GPU"):
        return
    if _FLAG_OF_CPUS not in os.environ.get("TF_XLA_FLAGS", ""):
        raise NotHereError(
            "On CPUs XLA compiles clusters if the environment has "
            f"TF_XLA_FLAGS={_FLAG_OF_CPUS}."
        )


def compare(
    build: Callable[[], keras.Model],
    dataset: Any,
    mesh: dict[str, Any],
    *,
    pipeline: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The comparison of a user's model on a mesh, see `train`."""
    wrap = None
    if pipeline is not None:
        count = 2 * mesh["pipeline"]
        wrap = functools.partial(
            tfscale.PipelineModel, num_microbatches=count, **pipeline
        )
    return tfscale.compare(
        build,
        dataset() if callable(dataset) else dataset,
        _strategy(build, mesh, options),
        _NUM_STEPS,
        wrap,
    )


def _strategy(build, mesh, options):
    made = tfscale.device_mesh(**mesh)
    layouts = tfscale.auto_layout_map(build, made) if "model" in mesh else None
    return tfscale.MeshStrategy(made, layouts, **options)


def found_in(reference: str) -> Any:
    """The object of `module:name`."""
    if not reference.partition(":")[2]:
        raise ValueError(
            "`--model` and `--data` must be of the form module:name. Received: "
            f"{reference!r}."
        )
    return pkgutil.resolve_name(reference)


def check(
    name: str,
    run: Callable[[], Any],
    expected: list[np.ndarray] | None = None,
) -> Result:
    """Runs a check that returns numbers like `expected`, or a `Comparison`."""
    keras.utils.clear_session()
    begin = time.perf_counter()
    try:
        found = run()
        compares = expected is None
        far = found.largest if compares else _difference(found, expected)
    except NotHereError as error:
        return Result(name, "not here", why=str(error))
    except Exception as error:  # One that fails must not hide the others.
        return Result(name, "fails", why=f"{type(error).__name__}: {error}")
    seconds, why = time.perf_counter() - begin, ""
    differs = not far <= _TOLERANCE
    if compares:
        differs = bool(found.differences(_TOLERANCE))
    if not np.isfinite(far):  # which JSON has no number for
        far, why = None, f"The largest difference is {far}."
    if compares and differs:
        why = "\n" + found.table(_TOLERANCE)
    return Result(name, "differs" if differs else "works", far, seconds, why)


def _difference(found, expected):
    """The largest, of the largest magnitude in its tensor; NaN if one is."""
    distances = [
        np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(np.max(distances))


def use_devices() -> tuple[str, int]:
    """The type of the devices, and how many of them, a power of two."""
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    if len(gpus) < 2:
        limit = _LOGICAL_GPU_MIB if gpus else None
        tfscale.use_virtual_devices(_LOGICAL_DEVICES, kind, memory_limit=limit)
    number = min(len(tf.config.list_logical_devices(kind)), _MOST_DEVICES)
    return kind, 2 ** (number.bit_length() - 1)


def measure_speed(num_devices: int) -> dict[str, float]:
    """Throughput of each device, by unit."""
    device = measure_device(num_devices, memory=1.0)
    return {
        "TFLOP/s in float32": device.float32_flops / 1e12,
        "TFLOP/s in 16 bits": device.flops / 1e12,
        "GB/s of memory": device.memory_bandwidth / 1e9,
        "GB/s to the next device": device.link_bandwidth / 1e9,
    }


def report(
    model: str | None = None,
    data: str | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """The results of all checks, as a dict that can be written as JSON.

    `model` and `data` are as in `found_in`. No check begins after `limit`
    seconds.
    """
    begin = time.perf_counter()
    # Each check has functions of its own: no news that these are traced.
    tf.get_logger().setLevel("ERROR")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    kind, number = use_devices()
    if limit is None:
        is_limited = kind == "GPU" and model is None
        limit = _SECONDS_ON_GPUS if is_limited else np.inf
    results: list[Result] = []

    def measured(name, measure):
        try:
            return measure()
        except Exception as error:  # It must not hide the checks.
            why = f"{type(error).__name__}: {error}"
            results.append(Result(name, "fails", why=why))
            return {}

    speed: dict[str, float] = {}
    xla: dict[str, float] = {}
    todo, expected = {}, None
    if model is not None:
        build, dataset = found_in(model), found_in(data or "")
        for name, options in cases(number):
            # By one schedule, and without what only some models can do.
            if not {"jit", "sequence_parallel"} & options.keys() and (
                not options.get("pipeline")
            ):
                run = functools.partial(compare, build, dataset, **options)
                todo[name] = run
    else:
        speed = measured("speed", lambda: measure_speed(number))
        if kind == "GPU":
            # Parts of one GPU share it.
            is_split = len(tf.config.list_physical_devices(kind)) < 2
            count = 1 if is_split else number
            xla = measured("speed of XLA", lambda: measure_xla(count))
        for name, options in cases(number):
            todo[name] = functools.partial(train, **options)
        expected = train()
    left = []
    for name, run in todo.items():
        if time.perf_counter() - begin > limit:
            left.append(name)
            continue
        results.append(check(name, run, expected))
        # The results so far, if somebody ends it.
        print(f"{name}: {results[-1].status}", file=sys.stderr, flush=True)
    if left:
        why = f"The time was up: {'; '.join(left)}. Pass more --seconds."
        results.append(Result(f"{len(left)} others", "not tried", why=why))
    return {
        "versions": {
            "tfscale": tfscale.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": sys.version.split()[0],
        },
        "machine": [str(d) for d in tf.config.list_physical_devices()],
        "devices": f"{number} x {kind}",
        "speed": speed,
        "xla": xla,
        "checks": [dataclasses.asdict(result) for result in results],
    }


def print_table(found: dict[str, Any]) -> None:
    """Prints the report for people."""
    console = rich.console.Console(highlight=False)
    table = rich.table.Table("Check", "", "Difference", "Seconds")
    for result in found["checks"]:
        numbers = ("", "")
        if result["difference"] is not None:
            numbers = f"{result['difference']:.1e}", f"{result['seconds']:.1f}"
        table.add_row(result["name"], result["status"], *numbers)
    console.print(table)
    console.print(", ".join(f"{k} {v}" for k, v in found["versions"].items()))
    speed = [f"{value:.3g} {name}" for name, value in found["speed"].items()]
    console.print(", ".join([f"{found['devices']}, each", *speed]))
    if xla := found["xla"]:
        ratio = xla["compiled"] / xla["uncompiled"]
        console.print(
            f"XLA: with jit_compile=True a step takes {ratio:.2f} of its time "
            f"without, {1e3 * xla['compiled']:.1f} ms of "
            f"{1e3 * xla['uncompiled']:.1f} ms; the largest difference of "
            f"losses is {xla['difference']:.1e}"
        )
    for result in found["checks"]:
        if result["why"]:
            text = f"{result['name']}, {result['status']}: {result['why']}"
            console.print(text, markup=False)


def main(args: list[str]) -> int:
    """Prints what works; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tfscale.selfcheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for an issue")
    parser.add_argument("--seconds", type=float, help="then no check begins")
    parser.add_argument("--model", help="module:build_model, a function")
    parser.add_argument("--data", help="module:dataset, of `--model`")
    options = parser.parse_args(args)
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data must be given together.")
    found = report(options.model, options.data, options.seconds)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)
    wrong = [r for r in found["checks"] if r["status"] in ("fails", "differs")]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
