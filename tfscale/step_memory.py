"""The peak of a device's memory in a training step: one model for all.

The planner, the summaries of stages and shards, and the limits of stages add up
here what they know of layers.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple
from typing import TypeVar

Number = TypeVar("Number", int, float)

# Tensors of a weight's size in its update: the sum of gradients, two results.
_IN_UPDATE = 3


def update_bytes(weight: float, num_shards: int = 1, gathers: bool = False):
    """Bytes that the update of a weight needs besides weight and slots.

    Args:
        weight: Bytes of the weight's gradient.
        num_shards: How many replicas divide its slots.
        gathers: Whether its new value is gathered from their shards.
    """
    return weight * (_IN_UPDATE / num_shards + (gathers and num_shards > 1))


def held_bytes(
    kept: Number, inputs: Number, recompute: bool
) -> tuple[Number, Number]:
    """Bytes that a stage holds of a microbatch, and that it computes again.

    The backward needs `kept` bytes; a stage that recomputes holds its input.
    """
    held = min(kept, inputs) if recompute else kept
    return held, kept - held


def microbatch_peak(held: float, working: float, update: float) -> float:
    """Bytes besides weights, slots and sums of gradients of a device.

    `held` are activations, `working` the most that the backward of a layer
    needs besides, `update` the most of `update_bytes`: after all backwards.
    """
    return max(held + working, update)


class Moment(NamedTuple):
    """Bytes at one moment of a step, besides weights and slots.

    Args:
        activations: What backwards that have not run need.
        gradients: Gradients that wait for other replicas, on average.
        working: Of the backward and the update that run.
    """

    activations: float
    gradients: float
    working: float


def whole_step_peak(
    kept: Sequence[float],
    working: Sequence[float],
    gradients: Sequence[float],
    updates: Sequence[float],
    num_replicas: float,
) -> Moment:
    """The fullest moment of a step that is not divided into microbatches.

    Activations go while gradients come: their peaks do not add up. A weight is
    updated as soon as its gradient is there, in all replicas.

    Args:
        kept: Bytes that each layer keeps for its backward.
        working: Bytes that the backward of each layer needs besides.
        gradients: Bytes of the gradients of each layer's weights.
        updates: The most of each layer's `update_bytes`.
        num_replicas: Replicas that sum gradients of weights which each has.
            Gradients of the first replica wait for the last one. Infinite, if
            all gradients wait for a norm.
    """
    waiting = 1 - 1 / num_replicas
    # Gradients of later layers are there when a backward runs.
    later = [0.0, *itertools.accumulate(reversed(gradients))][::-1]
    updated = [0.0, *itertools.accumulate(reversed(updates), max)][::-1]
    moments = zip(
        itertools.accumulate(kept, initial=0.0),
        (waiting * each for each in later),
        (each + update for each, update in zip([0.0, *working], updated)),
        strict=True,
    )
    return Moment(*map(float, max(moments, key=sum)))
