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
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.phases import Phase


@dataclasses.dataclass
class Tensors:
    """All tensors of a step of one rank, by the keys of tracing/keys.py.

    Attributes:
        shared: Parameters, which all microbatches use.
        states: State variables. Each forward takes those of the one before.
        sums: Sums of gradients, over the microbatches done so far.
        microbatches: For each microbatch all that belongs to it alone.
    """

    shared: dict[Any, tf.Tensor]
    states: dict[Any, tf.Tensor]
    sums: dict[Any, tf.Tensor]
    microbatches: list[dict[Any, tf.Tensor]]


def run_schedule(
    actions: Iterable[Action],
    stages: Sequence[Mapping[str, Phase]],
    devices: Sequence[Sequence[str]],
    tensors: Sequence[Tensors],
    *,
    emit: Callable = lambda action, function, arguments: function(*arguments),
    update: Any = None,
) -> None:
    """Emits the actions of a schedule for one replica.

    Args:
        actions: In an order in which each comes after all it depends on.
        stages: The phases of each stage, by letter, with keys `(rank, key)`.
        devices: The devices of each stage, one for each model rank.
        tensors: Those of each rank; results are added.
        emit: Calls the function of an action on its arguments.
        update: Does a U, of a stage without model ranks, and returns a tensor
            that is there when it is done.
    """
    last = {}
    for action in _with_weights(actions, stages):
        if action.kind == "U":
            (device,) = devices[action.stage]
            done = update(action)
            if not tf.executing_eagerly():
                with tf.device(device):
                    last[device] = [tf.identity(done).op]
            continue
        stage, ranks = stages[action.stage], devices[action.stage]
        phase = stage[action.kind]
        arguments, before = {}, {}
        for rank, device in enumerate(ranks):
            before[device] = last.get(device, [])
            with tf.device(device), tf.control_dependencies(before[device]):
                if action.kind == "F":
                    _note_states(stage, rank, action, tensors[rank])
                arguments.update(_arguments(phase, rank, action, tensors[rank]))
        # A control edge on a call that is inlined becomes one to each constant
        # of its function: only where nothing that it takes waits.
        alone = not any(_waits(key, action.kind) for _, key in phase.inputs)
        edges = itertools.chain(*before.values()) if alone else ()
        with tf.device(ranks[0]), tf.control_dependencies(list(edges)):
            *results, done = emit(
                action, phase.function, [arguments[key] for key in phase.inputs]
            )
        for device in ranks if not tf.executing_eagerly() else ():
            with tf.device(device), tf.control_dependencies(before[device]):
                last[device] = [tf.identity(done).op]
        for (rank, key), result in zip(phase.outputs, results):
            _keep(key, result, action, tensors[rank])


def _note_states(stage, rank, action, tensors):
    """Notes states as they are now for all phases of a microbatch.

    Also for a backward that computes this forward again: the same dropout
    masks.
    """
    microbatch = tensors.microbatches[action.microbatch]
    for phase in stage.values():
        for owner, key in phase.inputs:
            if owner == rank and isinstance(key, keys.State):
                microbatch[key] = tensors.states[key]


def _arguments(phase, rank, action, tensors):
    own = [key for owner, key in phase.inputs if owner == rank]
    microbatch = tensors.microbatches[action.microbatch]
    if action.kind != "F":
        _add_up_gradients(own, microbatch)
    lookup = collections.ChainMap(microbatch, tensors.sums, tensors.shared)
    return {
        (rank, key): tf.identity(lookup[key])
        if _waits(key, action.kind)
        else lookup[key]
        for key in own
    }


def _keep(key, result, action, tensors):
    microbatch = tensors.microbatches[action.microbatch]
    if isinstance(key, keys.GradientSum):
        tensors.sums[key] = result
    elif isinstance(key, keys.GradientTerm):
        microbatch.setdefault(key, []).append(result)
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


def _add_up_gradients(own, microbatch):
    """The gradient by a tensor is the sum of what its users make of it."""
    for key in own:
        if isinstance(key, keys.Gradient) and key not in microbatch:
            parts = microbatch.pop(keys.GradientTerm(key.value), None)
            microbatch[key] = (
                tf.add_n(parts)
                if parts
                else tf.zeros_like(microbatch[keys.Activation(key.value)])
            )
