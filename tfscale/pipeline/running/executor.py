"""Writes a schedule into the graph of a training step.

Every action becomes a call of its stage's function on its stage's device, and
waits for the action before it on that device. Between devices nothing but data
is waited for, so TensorFlow runs the stages at the same time:

    device 0   F0.0 ─► F0.1 ───────────► B0.0 ─► ...
                 │       │                ▲
               value   value           gradient
                 ▼       ▼                │
    device 1   F1.0 ─► B1.0 ─► F1.1 ─► B1.1 ─► ...

Where layers are split over model ranks, a stage has a device for each, and an
action is one call on all of them.

The repeated part of a schedule (schedules/steady.py) is written once, in a loop
(loop.py). TensorFlow's passes over the graph of the step are most of the time
to the first step, so it does not grow with the number of microbatches.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
from typing import Any

import tensorflow as tf

from tfscale.pipeline.running import loop
from tfscale.pipeline.running.array import Array
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.phases import Phase
from tfscale.schedules import steady
from tfscale.schedules.action import Action


@dataclasses.dataclass
class Tensors:
    """All tensors of a step of one rank, by the keys of tracing/keys.py.

    Attributes:
        shared: Parameters, which all microbatches use.
        states: State variables. Each forward takes those of the one before.
        sums: Sums of gradients, over the microbatches done so far.
        microbatches: For each microbatch all that belongs to it alone.
        arrays: What goes in and out of loops, of all microbatches.
        ahead: In a loop, how many microbatches further this iteration is than
            the first one, by which microbatches are numbered there.
    """

    shared: dict[Any, tf.Tensor]
    states: dict[Any, tf.Tensor]
    sums: dict[Any, tf.Tensor]
    microbatches: Any
    arrays: dict[Any, Array] = dataclasses.field(default_factory=dict)
    ahead: Any = 0

    def get(self, microbatch: int, key: Any) -> tf.Tensor:
        """A tensor that a microbatch uses."""
        found = self.microbatches[microbatch]
        if key not in found and key in self.arrays:
            array = self.arrays[key]
            found[key] = array.read(microbatch + self.ahead)
        if key not in found and isinstance(key, keys.Gradient):
            # Nothing that the loss depends on uses the tensor.
            return tf.zeros_like(
                self.get(microbatch, keys.Activation(key.value))
            )
        return collections.ChainMap(found, self.sums, self.shared)[key]


def run_schedule(
    actions: Iterable[Action],
    stages: Sequence[Mapping[str, Phase]],
    devices: Sequence[Sequence[str]],
    tensors: Sequence[Tensors],
    *,
    results: Set[Any] = frozenset(),
    emit: Callable | None = None,
    update: Any = None,
) -> None:
    """Emits the actions of a schedule for one replica.

    Repeated actions of many microbatches become a loop, unless `emit` or
    `update` is given, which treat each action apart, or a stage has operations
    with side effects, which TensorFlow would run in their order over all
    iterations.

    Args:
        actions: In an order in which each comes after all it depends on.
        stages: The phases of each stage, by letter, with keys `(rank, key)`.
        devices: The devices of each stage, one for each model rank.
        tensors: The tensors of each rank; results are added.
        results: Keys of what is wanted of each microbatch in the end.
        emit: Calls the function of an action on its arguments.
        update: Does a U, of a stage without model ranks, and returns a tensor
            that is there when it is done.
    """
    actions = list(_with_weights(actions, stages))
    executor = Executor(stages, devices, tensors, emit, update)
    are_few = len(tensors[0].microbatches) < steady.MIN_MICROBATCHES
    treats_each = tf.executing_eagerly() or emit or update
    if are_few or treats_each or _have_side_effects(stages):
        executor.run(actions)
        return
    makers, readers = _users(stages, {(a.kind, a.stage) for a in actions})
    for piece in steady.find_loops(actions, makers, readers, results):
        if isinstance(piece, steady.Loop):
            loop.run(executor, piece, makers, readers)
        else:
            executor.run(piece.actions)
    for rank, key in results:
        for number in range(len(tensors[rank].microbatches)):
            if key in tensors[rank].arrays:
                tensors[rank].get(number, key)


@dataclasses.dataclass
class Executor:
    """Emits actions one by one; see `run_schedule` for the arguments.

    `last` has for each device what is there when its last action is done.
    """

    stages: Sequence[Mapping[str, Phase]]
    devices: Sequence[Sequence[str]]
    tensors: Sequence[Tensors]
    emit: Callable | None = None
    update: Any = None
    last: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def run(self, actions: Iterable[Action]) -> None:
        """Emits actions, in their order."""
        for action in actions:
            if action.kind == "U":
                (device,) = self.devices[action.stage]
                done = self.update(action)
                self._is_done(device, done, [])
            else:
                self.emit_action(action)

    def emit_action(self, action: Action) -> None:
        """Emits an F, B or W."""
        stage, ranks = self.stages[action.stage], self.devices[action.stage]
        phase = stage[action.kind]
        arguments, before = {}, {}
        for rank, device in enumerate(ranks):
            before[device] = [self.last[device]] if device in self.last else []
            with tf.device(device), tf.control_dependencies(before[device]):
                if action.kind == "F":
                    _note_states(stage, rank, action, self.tensors[rank])
                arguments.update(
                    _arguments(phase, rank, action, self.tensors[rank])
                )
        # A control edge on a call that is inlined becomes one to each constant
        # of its function: only where nothing that it takes waits.
        alone = not any(_waits(key, action.kind) for _, key in phase.inputs)
        edges = itertools.chain(*before.values()) if alone else ()
        with tf.device(ranks[0]), tf.control_dependencies(list(edges)):
            ordered = [arguments[key] for key in phase.inputs]
            if self.emit is None:
                *results, done = phase.function(*ordered)
            else:
                *results, done = self.emit(action, phase.function, ordered)
        for device in ranks:
            self._is_done(device, done, before[device])
        for (rank, key), result in zip(phase.outputs, results):
            with tf.device(ranks[rank]):
                _keep(key, result, action, self.tensors[rank])

    def _is_done(self, device, done, before):
        if not tf.executing_eagerly():
            with tf.device(device), tf.control_dependencies(before):
                self.last[device] = tf.identity(done)


def _note_states(stage, rank, action, tensors):
    """A backward that computes this forward again needs its dropout masks."""
    microbatch = tensors.microbatches[action.microbatch]
    for phase in stage.values():
        for owner, key in phase.inputs:
            if owner == rank and isinstance(key, keys.State):
                before = keys.StateBefore(action.stage, key.number)
                microbatch[before] = tensors.states[key]


def _arguments(phase, rank, action, tensors):
    arguments = {}
    for owner, key in phase.inputs:
        if owner == rank:
            used = _of_stage(key, action.stage)
            tensor = tensors.get(action.microbatch, used)
            if _waits(key, action.kind):
                tensor = tf.identity(tensor)
            arguments[rank, key] = tensor
    return arguments


def _of_stage(key, stage):
    """Stages may share a state, which the forward of each changes."""
    if isinstance(key, keys.State):
        return keys.StateBefore(stage, key.number)
    return key


def _keep(key, result, action, tensors):
    microbatch = tensors.microbatches[action.microbatch]
    if isinstance(key, keys.GradientSum):
        tensors.sums[key] = result
    elif isinstance(key, keys.Gradient):
        before = microbatch.get(key)
        microbatch[key] = result if before is None else before + result
    else:
        # A backward may read a state as its forward left it.
        microbatch[key] = result
    if isinstance(key, keys.NewState):
        tensors.states[keys.State(key.number)] = result


def _with_weights(actions, stages):
    """The actions, with a W after each B of a stage that has none of its own.

    A stage is traced once: if one of its microbatches has its W apart, the B
    of no microbatch computes gradients of weights.
    """
    actions = list(actions)
    apart = set(actions)
    for action in actions:
        yield action
        weights = action._replace(kind="W")
        if (
            action.kind == "B"
            and "W" in stages[action.stage]
            and weights not in apart
        ):
            yield weights


def _waits(key, kind):
    """Whether a tensor is handed over once the action before is done.

    TensorFlow inlines the functions, and what is inlined waits for nothing but
    its data. So the data that everything in it depends on has to wait: inputs
    of a forward, gradients for a backward, what was kept for a W.
    """
    if isinstance(key, keys.Saved):
        return kind == "W"
    return not isinstance(key, keys.Param | keys.GradientSum)


def _have_side_effects(stages):
    return any(
        operation.op_def.is_stateful
        for stage in stages
        for phase in stage.values()
        for operation in phase.function.graph.get_operations()
    )


def _users(stages, done):
    """Actions that make and read each tensor, of those in `done`."""
    of_all = keys.Param | keys.GradientSum | keys.NewState
    makers = collections.defaultdict(set)
    readers = collections.defaultdict(set)
    for kind, stage in sorted(done):
        phase = stages[stage][kind]
        for rank, key in phase.outputs:
            if not isinstance(key, of_all):
                makers[rank, key].add((kind, stage))
        for rank, key in phase.inputs:
            key = _of_stage(key, stage)
            if isinstance(key, keys.StateBefore):
                makers[rank, key].add(("F", stage))
            if not (key == keys.REPLICA or isinstance(key, of_all)):
                readers[rank, key].add((kind, stage))
    for rank, key in list(readers):
        if isinstance(key, keys.Gradient) and (rank, key) not in makers:
            used = readers.pop((rank, key))
            readers[rank, keys.Activation(key.value)] |= used
    return makers, readers
