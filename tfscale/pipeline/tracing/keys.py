"""Keys of the tensors of a step: what goes into a stage and comes out of it.

They are the same in all stages, so that the executor can pass results of one on
to another without knowing what they are. Variables go by their number in the
model, its tensors by their `graph.Value`, stages by their index.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """The value of a trainable variable."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The value of another variable, before a forward."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class NewState:
    """The value of such a variable after the layers of a forward."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """A tensor of the model."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """Its Keras mask."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """Of the loss, by a tensor of the model."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GradientTerm:
    """The gradient that one user of a tensor contributes."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSum:
    """Of the gradients by a variable in a stage, over microbatches."""

    stage: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The tensor at an index of the flat `(y, sample_weight)`.

    Or of `(y, sample_weight, x)` for a `compute_loss` of the user's own.
    """

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How many rows of a microbatch count, a scalar."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """The number of the replica, a scalar of int64."""


@dataclasses.dataclass(frozen=True, slots=True)
class Losses:
    """Of a microbatch, see whole_batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Divisors:
    """Of a microbatch: what its losses are divided by, see there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Sums of all divisors over the global batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllRows:
    """How many rows the global batch has, a scalar."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossScale:
    """The weight of each loss of a microbatch."""


@dataclasses.dataclass(frozen=True, slots=True)
class AddedLoss:
    """The sum of what the layers of a stage gave to `add_loss`."""

    stage: int


@dataclasses.dataclass(frozen=True, slots=True)
class AddedScale:
    """The weight of an `AddedLoss`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """What BatchNormalization layers saw, see whole_batch/batch_norm.py.

    One after the other, of all calls in a stage that have one dtype.
    """

    stage: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What a phase saves for a later one, by its name in the traced graph."""

    phase: str
    tensor: str
