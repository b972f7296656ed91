"""The language of the rules: how tensors differ between ranks, and labels.

An operation has a label for each dim of its tensors.

A label says that the operation treats the entries along this dim separately, so
that it may run on a shard: the output is then the same shard of the whole
output, and each gradient the same shard of the whole gradient. Dims that an
operation mixes, drops or adds have the label None on the side where they have
no partner, and cannot be sharded.

    Softmax      (0, 1, 2)                      -> (0, 1, None)
    MatMul       (row, inner), (inner, column)  -> (row, column)
    Sum over 1   (0, 1, 2)                      -> (0, 2)
"""

import dataclasses

import numpy as np
import tensorflow as tf


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


@dataclasses.dataclass(frozen=True)
class Labels:
    """For each input and output a tuple with a label for each dim.

    None for an operand that has to be whole (an axis, a permutation).
    """

    inputs: tuple
    outputs: tuple


def elements(tensor: tf.Tensor) -> list[int | None] | None:
    """Entries of an integer vector, None for those that are not constant."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return [int(entry) for entry in value.reshape([-1])]
    op = tensor.op
    if op.type == "Pack" and op.inputs[0].shape.rank == 0:
        entries = map(tf.get_static_value, op.inputs)
        return [None if entry is None else int(entry) for entry in entries]
    if op.type == "ConcatV2":
        operands = [elements(operand) for operand in list(op.inputs)[:-1]]
        known = [operand for operand in operands if operand is not None]
        if len(known) == len(operands):
            return [entry for operand in known for entry in operand]
    if tensor.shape.rank == 1 and tensor.shape[0] is not None:
        return [None] * tensor.shape[0]
    return None


def rank_of(tensor: tf.Tensor) -> int:
    """The number of dims, or `NoRule` where it is not known."""
    if tensor.shape.rank is None:
        raise NoRule("the number of dims of a tensor is not known")
    return tensor.shape.rank


def constant(tensor: tf.Tensor) -> np.ndarray:
    """The value of a tensor, or `NoRule` where it is not constant."""
    value = tf.get_static_value(tensor)
    if value is None:
        raise NoRule(f"its operand {tensor.name!r} is not constant")
    return value


def dims_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """Labels of all dims, counted from the left."""
    return tuple(range(rank_of(tensor)))


def dims_from_right(tensor: tf.Tensor) -> tuple[int, ...]:
    """Labels of all dims, counted from the right as in broadcasting."""
    return tuple(range(-rank_of(tensor), 0))


def without(dims: tuple, *blocked: int) -> tuple:
    """The same labels with None at some indices, which may be negative."""
    removed = {dims[index] for index in blocked}
    return tuple(None if dim in removed else dim for dim in dims)


def mixing(op: tf.Operation, *mixed: int, operand: int = 0) -> Labels:
    """Labels of an operation on one operand that mixes entries along dims.

    All other operands have to be whole. `mixed` are indices of dims.
    """
    kept = without(dims_of(op.inputs[operand]), *mixed)
    operands = (
        kept if index == operand else None for index in range(len(op.inputs))
    )
    return Labels(tuple(operands), (kept,) * len(op.outputs))
