"""How a tensor differs between the ranks."""

import dataclasses


class NoRule(Exception):
    """The operation cannot run on a part of its input; the text says why."""


@dataclasses.dataclass(frozen=True)
class Divided:
    """The entries along `dim` lie on the ranks, in order, in equal parts."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """An integer scalar or vector made from shapes of divided tensors.

    Attributes:
        local: For each entry whether it is that of the whole tensor divided by
            the number of ranks; else it is the same as in the whole model.
    """

    local: tuple[bool, ...]
