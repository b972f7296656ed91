"""Keys of the tensors of a step: what goes into a stage and comes out of it.

They are the same in all stages, so that the executor can pass results of one on
to another without knowing what they are. Variables are named by their number in
the model, its tensors by their `graph.Value`, stages by their index.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class _OfVariable:
    number: int


@dataclasses.dataclass(frozen=True)
class _OfTensor:
    value: Any


@dataclasses.dataclass(frozen=True)
class OfBatch:
    """A key of one tensor for each batch or microbatch."""

    name: str


ROWS = OfBatch("rows")  # how many of a microbatch count, a scalar
REPLICA = OfBatch("replica")  # the number of this one, a scalar of int64
LOSSES = OfBatch("losses")  # of a microbatch, see step/losses.py
DIVISORS = OfBatch("divisors")  # of the losses of a microbatch
TOTALS = OfBatch("totals")  # sums of the divisors over the global batch
ALL_ROWS = OfBatch("all_rows")  # how many the global batch has, a scalar
LOSS_SCALE = OfBatch("loss_scale")  # the weight of each loss of a microbatch
ADDED_SCALE = OfBatch("added_scale")  # the weight of an `AddedLoss`


class Param(_OfVariable):
    """The value of a trainable variable."""


class State(_OfVariable):
    """The value of another variable, before a forward."""


@dataclasses.dataclass(frozen=True)
class StateBefore:
    """A `State` before the forward of one of the stages that use it."""

    stage: int
    number: int


class NewState(_OfVariable):
    """The value of such a variable after the layers of a forward."""


class Activation(_OfTensor):
    """A tensor of the model."""


class Mask(_OfTensor):
    """Its Keras mask."""


class Gradient(_OfTensor):
    """The gradient of the loss by a tensor of the model.

    Of a backward's results it is what one user of the tensor contributes.
    """


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The sum of the gradients by a variable in a stage, over microbatches."""

    stage: int
    number: int


@dataclasses.dataclass(frozen=True)
class Target:
    """The tensor at an index of the flat `(y, sample_weight)`.

    Or of `(y, sample_weight, x)` for a `compute_loss` of the user.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class AddedLoss:
    """The sum of the losses that the layers of a stage add."""

    stage: int


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of BatchNormalization layers, see step/batch_norm.py.

    Concatenated, of all calls in a stage that have one dtype.
    """

    stage: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that a phase saves for a later one, by its name in the graph."""

    phase: str
    tensor: str
