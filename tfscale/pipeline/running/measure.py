"""Measures how long each call of a model takes, and each action of a step."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.collectives.device_names import are_accelerators
from tfscale.graphs.function_options import assembled
from tfscale.graphs.function_options import no_grappler
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.running.step import StepResult
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.stages.trace_costs import map_calls
from tfscale.pipeline.tracing import keys
from tfscale.schedules.simulate import Span

# Each call runs for about as long as this, in seconds, to be measured.
_WINDOW = 0.02
# A choice: the median of so many counts.
_WINDOWS = 3
# Steps to warm up, and steps that are measured.
_UNMEASURED, _MEASURED = 2, 5


def measure_calls(
    graph: Graph, device: str, rows: int = 1
) -> list[tuple[float, float, float]]:
    """Seconds that F, B and W together, and W of each call of a model take.

    Each of them runs alone, many times in a loop inside TensorFlow. Equal calls
    are measured once, so they cost the same. XLA, which compiles whole stages
    on accelerators, is left out.

    Variables are read, and nothing is changed. Inputs, 1 where they are
    floating and else 0, should have as many `rows` as a microbatch: with few
    rows an accelerator takes as long for a small layer as for a large one.

    Raises:
        ValueError: If another size than that of the batch is unknown.
    """

    def seconds(stage, phases):
        with tf.device(device):
            found = _seconds(stage, phases)
        weight = found.get("W", 0.0)
        return found["F"], found.get("B", 0.0) + weight, weight

    return map_calls(seconds, graph, rows, weights_apart=True)


def measure_step(
    run_step: Callable[[Any, Callable], StepResult],
    plan: PipelinePlan,
    strategy: MeshStrategy,
    data: tuple,
) -> list[Span]:
    """When each action of a training step begins and ends.

    The schedule runs as in training, on all replicas, but no variable changes.
    An action begins when its inputs are on its device and the action before it
    there is over; it ends when all of its results are there.

    Times are read on the host of each device (those of several machines only
    compare if their clocks agree). A GPU is given work ahead of time, which
    seems done at once to the host. So there, each reading waits until a number
    that was made after it has been copied to the host: a measured step takes
    longer than one in training. CPU devices need none of this.

    Returns the spans of the first replica, in seconds from the first start, of
    the step that took the median time. `data` are `(x, y, sample_weight)` of
    one global batch, or fewer of them; `run_step` runs a replica's part of them
    with an `emit` of `run_schedule`.
    """
    actions, clocks = list(plan.schedule.order()), {}

    def replica_step(data):
        replica, _ = strategy.extended.replica_and_rank()
        # One for all ranks of the replica, which run an action together.
        if replica not in clocks:
            clocks[replica] = _Clock(are_accelerators(strategy.device_rows))
        clock = clocks[replica]
        result = run_step(data, clock.emit)
        times = tf.stack([tf.stack(clock.times[each]) for each in actions])
        # All that a step makes: what nobody wants would not be computed.
        made = result.loss, result.outputs, result.gradients, result.states
        return times, made

    @tf.function(autograph=False)
    def run(data):
        return strategy.run(replica_step, args=(data,))

    (batch,) = strategy.experimental_distribute_dataset(
        # It makes one tensor of a list.
        tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(data))
    )
    steps = []
    for _ in range(_UNMEASURED + _MEASURED):
        with assembled():
            times = run(batch)[0]
        times = strategy.experimental_local_results(times)[0].numpy()
        steps.append(times - times.min())
    steps = sorted(steps[_UNMEASURED:], key=lambda times: times.max())
    return [
        Span(action, plan.schedule.stage_devices[action.stage], *map(float, t))
        for action, t in zip(actions, steps[len(steps) // 2])
    ]


def timelines(plan: PipelinePlan, measured: list[Span] | None = None) -> dict:
    """A predicted step and a measured one, for `tfscale.schedules.timeline`.

    Without a measured step, times are in units of the mean forward of a stage.
    With one, they are in seconds: the prediction is scaled to the same work of
    all devices, so that only its division and the waiting differ.
    """
    predicted = list(plan.simulation.spans)
    if measured is None:
        return {"predicted": predicted}
    scale = _work(measured) / _work(predicted)
    predicted = [
        span._replace(start=scale * span.start, end=scale * span.end)
        for span in predicted
    ]
    return {"predicted": predicted, "measured": measured}


def _work(spans):
    return sum(span.end - span.start for span in spans)


class _Clock:
    """Reads the time around actions, on the host of their device.

    Where devices are given work ahead of time, one number is copied from the
    device before each reading. `times` has start and end of each action.
    """

    def __init__(self, waits_for_device):
        self.times = {}
        self._waits_for_device = waits_for_device
        # A function, because a call of it counts as stateless: TensorFlow
        # runs stateful operations like `tf.timestamp` in the order in which
        # they were traced, and so the stages one after the other.
        with tf.init_scope():
            self._now = tf.function(tf.timestamp).get_concrete_function()

    def emit(self, action, function, arguments):
        """See `run_schedule`."""
        start = self._read(arguments)
        # Through identities, which wait for what the function takes and makes:
        # one that is inlined waits for nothing else.
        with tf.control_dependencies([start]):
            results = function(*map(tf.identity, arguments))
        end = self._read([tf.identity(result) for result in results])
        self.times[action] = start, end
        # The next action begins after the reading: else a thread that is
        # needed for it may first be given the whole action.
        with tf.control_dependencies([end]):
            return [tf.identity(result) for result in results]

    def _read(self, tensors):
        with contextlib.ExitStack() as stack:
            stack.enter_context(tf.control_dependencies(tensors))
            if self._waits_for_device:
                number = _first_number(tensors)
                stack.enter_context(tf.device("/device:CPU:0"))
                stack.enter_context(
                    tf.control_dependencies([tf.identity(number)])
                )
            (now,) = tf.raw_ops.PartitionedCall(
                args=[], Tout=[tf.float64], f=self._now
            )
        return now


def _first_number(tensors):
    # Floating, because TensorFlow keeps small integers on the host.
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return tf.reshape((floating or tensors)[0], [-1])[0]


def _seconds(stage, phases):
    tensors, seconds = {}, {}
    for letter, phase in phases.items():
        for key, tensor in zip(phase.inputs, phase.function.inputs):
            if key not in tensors:
                tensors[key] = _argument(key, tensor, stage.variables)
        # Without weights there is no W, without inputs to train no B.
        seconds[letter] = _phase_seconds(phase, tensors) if phase.outputs else 0
        tensors.update(phase.run(tensors))
    return seconds


def _phase_seconds(phase, tensors):
    def once(count, _):
        # All of them, because what nobody waits for is not computed.
        made = [tf.identity(result) for result in phase.run(tensors).values()]
        with tf.control_dependencies(made):
            return count + 1, tf.cast(_first_number(made), tf.float32)

    @tf.function(autograph=False)
    def repeat(times):
        return tf.while_loop(
            lambda count, _: count < times,
            once,
            [0, 0.0],
            parallel_iterations=1,
        )

    def run(times):
        start = time.perf_counter()
        # Without Grappler, which would leave out what is not used.
        with no_grappler():
            repeat(tf.constant(times))[1].numpy()
        return (time.perf_counter() - start) / times

    run(1)
    times = max(1, min(1000, round(_WINDOW / run(3))))
    return statistics.median(run(times) for _ in range(_WINDOWS))


def _argument(key, tensor, variables):
    if isinstance(key, keys.Param | keys.State):
        return tf.identity(variables[key.number].value)
    if tensor.dtype.is_floating:
        return tf.ones(tensor.shape, tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)
