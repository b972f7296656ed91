"""What a planner has to know of a model: a table with a row for each layer."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple


class Work(NamedTuple):
    """What a layer does with one example, on one model rank.

    Args:
        flops: Of matrix products.
        products: Matrix products, or groups of them that run as one.
        moved: Bytes of activations that are made.
        undivided: Those of them that all model ranks have, unless they divide
            the sequence.
        summed: Bytes that are summed over the model ranks.
    """

    flops: float = 0
    products: float = 0
    moved: float = 0
    undivided: float = 0
    summed: float = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A call of a layer; figures are of one example and one model rank.

    Args:
        name: Of the layer.
        forward: What its forward does.
        backward: What its backward does.
        trainable: Elements of trainable weights.
        frozen: Elements of other variables.
        kept: Bytes that are kept until the backward.
        undivided: Those of them that all model ranks have, unless they divide
            the sequence.
        kept_once: Bytes that are kept for a microbatch, however many examples
            it has.
        crossing: Bytes that cross a cut just before the layer.
    """

    name: str
    forward: Work
    backward: Work
    trainable: float = 0
    frozen: float = 0
    kept: float = 0
    undivided: float = 0
    kept_once: float = 0
    crossing: float = 0


@dataclasses.dataclass(frozen=True)
class ModelTable:
    """A model as the planner sees it.

    Args:
        name: Of the model.
        by_ranks: Its layers, by the number of model ranks; 1 is always there.
        flops: Forward FLOPs of one example, undivided.
        num_weights: Elements of its weights.
        tokens: Tokens of an example, if it consists of such.
        is_half: Whether it computes in 16 bits.
        can_be_cut: Whether it can be a pipeline.
        notes: What was not planned, and why.
    """

    name: str
    by_ranks: Mapping[int, tuple[Layer, ...]]
    flops: float
    num_weights: int = 0
    tokens: int | None = None
    is_half: bool = False
    can_be_cut: bool = True
    notes: tuple[str, ...] = ()
