"""How a tensor differs between the ranks."""

import dataclasses


class NoRule(Exception):
    """The operation cannot run on a shard of its input; the text says why.

    `operand` is a whole tensor whose shard along `dim` would do, if any;
    `made` the states of the outputs if only the gradients of `operand` were
    summed.
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
    """The same on all ranks, and used by each separately.

    Its gradient is what DTensor calls `Partial`: the ranks' gradients are
    summed. `direct` is true of the gathered tensor, false of tensors made from
    it.
    """

    direct: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """An integer scalar or vector made from shapes of sharded tensors.

    `local` says for each entry whether it is the whole tensor's divided by the
    number of ranks; the others are the same as in the whole model.
    """

    local: tuple[bool, ...]
