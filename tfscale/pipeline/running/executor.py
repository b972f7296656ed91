"""Writes a schedule into the graph of a training step.

Every action becomes a call of its stage's function on its stage's device, and
waits for the action before it on that device. Between devices nothing but data
is waited for, so TensorFlow runs the stages at the same time:

    device 0   F0.0 ─► F0.1 ───────────► B0.0 ─► ...
                 │       │                ▲
               value   value           gradient
                 ▼       ▼                │
    device 1   F1.0 ─► B1.0 ─► F1.1 ─► B1.1 ─► ...
"""

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.pipeline.planning.action import Action
from tfscale.pipeline.tracing.trace import TracedStage


@dataclasses.dataclass
class Tensors:
    """All tensors of a step of one replica, by the keys of stage_graph.py.

    Attributes:
        shared: Parameters, which all microbatches use.
        states: State variables by key. Each forward goes on with what the one
            before it made of them.
        sums: Sums of gradients, over the microbatches done so far.
        microbatches: For each microbatch all that belongs to it alone.
    """

    shared: dict[Any, tf.Tensor]
    states: dict[Any, tf.Tensor]
    sums: dict[Any, tf.Tensor]
    microbatches: list[dict[Any, tf.Tensor]]


def run_schedule(
    actions: Iterable[Action],
    stages: Sequence[TracedStage],
    devices: Sequence[str],
    tensors: Tensors,
    *,
    whole_batch: Collection = frozenset(),
    emit: Callable = lambda action, function, arguments: function(*arguments),
) -> None:
    """Emits the actions of a schedule for one replica.

    Args:
        actions: In an order in which each comes after all it depends on.
        stages: The traced functions of each stage.
        devices: The device of each stage.
        tensors: What there is at the start; results are added to it.
        whole_batch: Keys of states that every microbatch gets as they were
            before the step (statistics of BatchNormalization).
        emit: Calls the function of an action on its arguments; for whoever
            wants to know when it starts and ends.
    """
    last = {}
    for action in _with_weights(actions, stages):
        phase = stages[action.stage].phases[action.kind]
        device = devices[action.stage]
        microbatch = tensors.microbatches[action.microbatch]
        with tf.device(device), tf.control_dependencies(last.get(device, [])):
            if action.kind == "F":
                # States as they are now, also for a backward that computes
                # this forward again: the same dropout masks.
                for each in stages[action.stage].phases.values():
                    microbatch.update(
                        (key, tensors.states[key])
                        for key in each.inputs
                        if key[0] == "state"
                    )
            else:
                _add_up_gradients(phase, microbatch)
            lookup = collections.ChainMap(
                microbatch, tensors.sums, tensors.shared
            )
            arguments = [
                _wait(key, lookup[key], action.kind) for key in phase.inputs
            ]
            *results, done = emit(action, phase.function, arguments)
            if not tf.executing_eagerly():
                last[device] = [tf.identity(done).op]
        for key, result in zip(phase.outputs, results):
            if key[0] == "sum":
                tensors.sums[key] = result
            elif key[0] == "gradient of":
                microbatch.setdefault(key, []).append(result)
            elif key[0] == "new_state" and key[1] not in whole_batch:
                tensors.states["state", key[1]] = result
            else:
                microbatch[key] = result


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
            and "W" in stages[action.stage].phases
            and weights not in apart
        ):
            yield weights


def _wait(key, tensor, kind):
    """The tensor, once the action before is done.

    TensorFlow inlines the functions, and what is inlined waits for nothing but
    its data. So the data that everything in it depends on has to wait: inputs
    of a forward, gradients for a backward, what was kept for a W.
    """
    waits = key[0] not in ("param", "sum", "kept")
    if waits or (key[0] == "kept" and kind == "W"):
        return tf.identity(tensor)
    return tensor


def _add_up_gradients(phase, microbatch):
    """The gradient by a tensor is the sum of what its users make of it."""
    for key in phase.inputs:
        if key[0] == "gradient" and key not in microbatch:
            parts = microbatch.pop(("gradient of", key[1]), None)
            microbatch[key] = (
                tf.add_n(parts)
                if parts
                else tf.zeros_like(microbatch["value", key[1]])
            )
