"""Keys of the tensors of a step: what goes into a stage and comes out of it.

They are the same in all stages, so that the executor can pass results of one on
to another without knowing what they are. Variables go by their number in the
model, its tensors by their `graph.Value`, stages by their index.
"""

import dataclasses
from typing import Any

_key = dataclasses.dataclass(frozen=True, slots=True)


@_key
class Param:
    """The value of a trainable variable."""

    number: int


@_key
class State:
    """The value of another variable, before a forward."""

    number: int


@_key
class NewState:
    """What the layers of a forward made of it."""

    number: int


@_key
class Activation:
    """A tensor of the model."""

    value: Any


@_key
class Mask:
    """Its Keras mask."""

    value: Any


@_key
class Gradient:
    """Of the loss, by a tensor of the model."""

    value: Any


@_key
class GradientTerm:
    """What one user of a tensor adds to that."""

    value: Any


@_key
class GradientSum:
    """Of the gradients by a variable in a stage, over microbatches."""

    stage: int
    number: int


@_key
class Target:
    """The tensor at a place of the flat `(y, sample_weight)`.

    Or of `(y, sample_weight, x)` for an `OwnLoss`.
    """

    place: int


@_key
class Rows:
    """How many rows of a microbatch count, a scalar of float32."""


@_key
class Losses:
    """Of a microbatch, see whole_batch."""


@_key
class Divisors:
    """Of a microbatch: what its losses are divided by, see there."""


@_key
class LossScale:
    """What each of the losses of a microbatch counts."""


@_key
class AddedLoss:
    """The sum of what the layers of a stage gave to `add_loss`."""

    stage: int


@_key
class AddedScale:
    """What that counts."""


@_key
class StatisticsWeight:
    """Rows or mask behind the statistics of a BatchNormalization.

    They go by the number of its mean.
    """

    number: int


@_key
class Kept:
    """What a phase keeps for a later one, by its name in the traced graph."""

    phase: str
    tensor: str
