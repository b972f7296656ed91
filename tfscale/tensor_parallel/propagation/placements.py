"""How a tensor differs between the ranks."""

import dataclasses


class NoRule(Exception):
    """The operation cannot run on a part of its input; the text says why.

    Attributes:
        operand: The whole tensor that is in the way, if one is.
        dim: Along which dim of it a part would do; None if none would.
        made: What it would make if only gradients of `operand` were added up.
    """

    def __init__(self, reason, operand=None, dim=None, made=()):
        super().__init__(reason)
        self.operand = operand
        self.dim = dim
        self.made = made


class Infeasible(Exception):
    """Nothing can be sharded; the text says why."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The entries along `dim` lie on the ranks, in order, in equal parts."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Replicated:
    """The same on all ranks, of which each rank makes its own use.

    Its gradient is `Partial` in the words of DTensor: those of the ranks are
    added up.

    Attributes:
        direct: Whether it is what was gathered, and nothing made from it.
    """

    direct: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """An integer scalar or vector made from shapes of sharded tensors.

    Attributes:
        local: For each entry whether it is that of the whole tensor divided by
            the number of ranks; else it is the same as in the whole model.
    """

    local: tuple[bool, ...]
