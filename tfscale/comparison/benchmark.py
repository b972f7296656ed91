"""`tfscale.benchmark`: how fast is a model under each of several strategies?"""

import dataclasses
import functools
import json
import pickle
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import rich.markup
import rich.table
import tensorflow as tf

from tfscale.comparison.timed_process import TimedProcess
from tfscale.comparison.timed_training import Job
from tfscale.formatting import as_text
from tfscale.formatting import readable_bytes
from tfscale.integers import check_integer

_WIDTH = 120
ONE_DEVICE = "one device"
_TABLE = ("Strategy", "First step", "Step", "Examples/s", "Memory")


@dataclasses.dataclass(frozen=True)
class Timing:
    """How a model trains under one strategy.

    Attributes:
        name: That of the strategy, or `"one device"`.
        first_step_seconds: Of the first step, with tracing and compiling.
        step_seconds: Of a step after it: the median over the rounds.
        examples_per_second: Rows of all devices over `step_seconds`.
        memory_bytes: The most so far of the fullest accelerator; on CPUs, of
            the process, with the libraries in it. Of worker 0, if several
            train. None if nobody knows.
        speedups: For each round, the time of a step on one device over that
            under the strategy.
        error: Why it could not be measured, or None. The figures are then NaN.
    """

    name: str
    first_step_seconds: float = float("nan")
    step_seconds: float = float("nan")
    examples_per_second: float = float("nan")
    memory_bytes: float | None = None
    speedups: tuple[float, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The report of `tfscale.benchmark`.

    Attributes:
        timings: That of one device, and then those of the strategies.
    """

    timings: tuple[Timing, ...]

    def table(self) -> str:
        """The figures as a table, each strategy against one device."""
        table = rich.table.Table(*_TABLE, "Speedup", "Range")
        for timing in self.timings:
            table.add_row(*_cells(timing))
        errors = (
            f"{t.name} failed: {t.error}" for t in self.timings if t.error
        )
        return as_text(table, *errors, width=_WIDTH)

    def to_json(self) -> str:
        """The figures as JSON: a list of one object for each strategy."""
        rows = [
            {
                key: None if value != value else value
                for key, value in dataclasses.asdict(timing).items()
            }
            for timing in self.timings
        ]
        return json.dumps(rows, indent=2, allow_nan=False)


def benchmark(
    build_model: Callable[[], keras.Model],
    dataset: Callable[[], tf.data.Dataset],
    strategies: Mapping[str, Callable[[], Any]],
    *,
    one_device: Callable[[], None] | None = None,
    launch: Mapping[str, Sequence[str]] | None = None,
    steps: int = 10,
    rounds: int = 5,
    timeout: float = 600.0,
) -> Benchmark:
    """Trains a model under several strategies, and times its steps.

    Each strategy has processes of its own, with a TensorFlow of their own, and
    so has plain Keras on one device, whose process stays. The two take turns,
    `steps` steps at a time, so that what else the machine does falls on both.
    A strategy that fails is a row with its error; the others go on.

    Functions are sent to these processes by name, as `multiprocessing` does:
    they are those of a module, or of a script that is guarded by
    `if __name__ == "__main__":`, or a `functools.partial` of such a function.
    Their output is not shown.

    Args:
        build_model: Returns a compiled model. It is called in the strategy's
            scope, as in `tfscale.compare`.
        dataset: Returns batches for all devices together, as `fit` takes them.
            They are repeated without end. Throughput is counted by the rows
            of the first batch.
        strategies: For each name a function that returns a strategy, or a
            strategy and a function that wraps the compiled model, such as
            `lambda m: tfscale.PipelineModel(m, 8)`. It is called first in its
            process, so it may set up virtual devices and threads, and calls
            `tfscale.initialize()` if it is launched.
        one_device: Called first in the process of one device: sets up threads,
            for instance.
        launch: For strategies of several processes, their flags of
            `python -m tfscale.launch`: `{"workers": ["--num_workers=2"]}`.
        steps: The number of steps of a turn.
        rounds: The number of turns of each strategy.
        timeout: Seconds, after which a start, a first step or a turn counts as
            failed.

    Returns:
        A `Benchmark`, with `table()` and `to_json()`.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: Before anything is started, if there is no strategy, a
            function cannot be sent to a process, or `launch` names what is no
            strategy.
        RuntimeError: If the model cannot train on one device.

    Example, for a file `scaling.py`; docs/strategies.md has it whole:

    >>> import tfscale
    >>> def replicas():
    ...     tfscale.use_virtual_devices(2)
    ...     return tfscale.MeshStrategy(tfscale.device_mesh(data=2))
    >>> def main(build_model, dataset):
    ...     strategies = {"replicas": replicas}
    ...     report = tfscale.benchmark(build_model, dataset, strategies)
    ...     print(report.table())

    """
    launch = launch or {}
    _check(build_model, dataset, strategies, launch, one_device)
    for name, number in (("steps", steps), ("rounds", rounds)):
        check_integer(name, number)

    def started(strategy, flags, turns):
        job = Job(build_model, dataset, strategy, steps, turns)
        return TimedProcess(job, flags, timeout)

    # The first step, and turns with each strategy, or without any.
    one_device = functools.partial(_no_strategy, one_device)
    plain = started(one_device, (), 2 + rounds * len(strategies))
    try:
        first = plain.take_turn()
        ours: list[dict] = []
        timings = []
        for name, strategy in strategies.items():
            of_plain: list[dict] = []
            try:
                process = started(strategy, launch.get(name, ()), 1 + rounds)
                try:
                    theirs = [process.take_turn()]
                    for _ in range(rounds):
                        of_plain.append(plain.take_turn())
                        theirs.append(process.take_turn())
                finally:
                    process.end()
            except (RuntimeError, TimeoutError) as error:
                timings.append(Timing(name, error=str(error)))
            else:
                timings.append(_timing(name, theirs, of_plain))
            ours += of_plain
        if not ours:  # all have failed
            ours = [plain.take_turn()]
    finally:
        plain.end()
    return Benchmark((_timing(ONE_DEVICE, [first, *ours], ours), *timings))


def _no_strategy(setup):
    if setup is not None:
        setup()


def _check(build_model, dataset, strategies, launch, one_device):
    functions = {"build_model": build_model, "dataset": dataset}
    functions |= {f"strategies[{k!r}]": v for k, v in strategies.items()}
    if one_device is not None:
        functions["one_device"] = one_device
    for argument, function in functions.items():
        if not callable(function) or isinstance(function, keras.Layer):
            raise TypeError(
                f"`{argument}` must be a function of no arguments, which is "
                f"called in a process of its own. Received: {function!r}."
            )
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"`{argument}` must be a function that another process can "
                "import: one of a module, or a `functools.partial` of such a "
                f"function. Received: {function!r} ({error})."
            ) from error
    if not strategies or ONE_DEVICE in strategies:
        raise ValueError(
            "`strategies` must name at least one strategy, and none of them "
            f"{ONE_DEVICE!r}, which is measured anyway. Received: "
            f"{list(strategies)}."
        )
    if not set(launch) <= set(strategies):
        raise ValueError(
            "`launch` must have flags for names of `strategies`. Received: "
            f"{list(launch)}, where `strategies` has {list(strategies)}."
        )


def _timing(name, turns, of_one_device):
    first, *turns = turns
    seconds = [turn["seconds"] / turn["steps"] for turn in turns]
    step = statistics.median(seconds)
    return Timing(
        name,
        first["seconds"],
        step,
        first["rows"] / step,
        max(t["memory_bytes"] or 0.0 for t in (first, *turns)) or None,
        tuple(
            plain["seconds"] / plain["steps"] / ours
            for plain, ours in zip(of_one_device, seconds)
        ),
    )


def _cells(timing):
    name = rich.markup.escape(timing.name)
    if timing.error:
        return name, "failed"
    memory = timing.memory_bytes
    return (
        name,
        f"{timing.first_step_seconds:.1f} s",
        f"{1e3 * timing.step_seconds:.1f} ms",
        f"{timing.examples_per_second:.1f}",
        readable_bytes(memory) if memory else "",
        f"{statistics.median(timing.speedups):.2f}",
        f"{min(timing.speedups):.2f} to {max(timing.speedups):.2f}",
    )
