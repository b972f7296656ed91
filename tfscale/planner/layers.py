"""A model as a table with a row for each layer, and the sums of its stages."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

# Elements of a weight that caches of CPUs do not hold: 16 MB of them.
LARGE_WEIGHT = 1 << 22


class Work(NamedTuple):
    """The work of a layer for one example, on one model rank.

    Args:
        flops: Of matrix products.
        products: Matrix products, or groups of them that run as one.
        moved: Bytes of activations that are written.
        undivided: The part of `moved` that every model rank has, unless the
            ranks divide the sequence.
        summed: Bytes that are summed over the model ranks.
        sums: How many tensors these are.
        drawn: Random numbers.
    """

    flops: float = 0
    products: float = 0
    moved: float = 0
    undivided: float = 0
    summed: float = 0
    sums: float = 0
    drawn: float = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A call of a layer; figures are for one example and one model rank.

    Args:
        trainable: Elements of trainable weights.
        large: Elements of those of them that have `LARGE_WEIGHT` or more.
        largest: Elements of the largest of them.
        frozen: Elements of other variables.
        kept: Bytes that are kept until the backward.
        undivided: The part of `kept` that every model rank has, unless the
            ranks divide the sequence.
        kept_once: Bytes that are kept for a microbatch of any size.
        cut_bytes: Bytes that cross a cut just before the layer.
    """

    name: str
    forward: Work
    backward: Work
    trainable: float = 0
    large: float = 0
    largest: float = 0
    frozen: float = 0
    kept: float = 0
    undivided: float = 0
    kept_once: float = 0
    cut_bytes: float = 0


@dataclasses.dataclass(frozen=True)
class ModelTable:
    """A model as the planner sees it.

    Args:
        by_ranks: Its layers, by the number of model ranks; 1 is always there.
        flops: Forward FLOPs of one example, undivided.
        num_weights: Elements of its weights.
        tokens: Tokens of an example, if it consists of tokens.
        is_half: Whether it computes in 16 bits.
        can_be_cut: Whether it can be a pipeline.
        notes: What is not planned, and why.
    """

    name: str
    by_ranks: Mapping[int, tuple[Layer, ...]]
    flops: float
    num_weights: int = 0
    tokens: int | None = None
    is_half: bool = False
    can_be_cut: bool = True
    notes: tuple[str, ...] = ()


def balanced_cuts(
    layers: Sequence[Layer],
    num_stages: int,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Cuts whose most expensive stage is the cheapest.

    Like `balance.partition`, but fast enough for thousands of plans. There
    must be a layer for each stage. `speeds` are those of the stages' devices.
    """
    speeds = speeds or (1,) * num_stages
    costs = [layer.forward.flops + layer.backward.flops for layer in layers]
    before = [0, *itertools.accumulate(costs)]

    def cuts(limit):
        found = [0]
        for stage in range(1, num_stages):
            most = before[found[-1]] + limit * speeds[stage - 1]
            stop = bisect.bisect_right(before, most) - 1
            # At least one layer for this stage, and for each that follows.
            stop = max(stop, found[-1] + 1)
            found.append(min(stop, len(layers) - num_stages + stage))
        return found

    def fits(limit):
        bounds = itertools.pairwise([*cuts(limit), len(layers)])
        return all(
            before[b] - before[a] <= limit * speed
            for (a, b), speed in zip(bounds, speeds)
        )

    low, high = max(costs) / max(speeds), before[-1] / min(speeds)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return tuple(cuts(high)[1:])


def stage_sums(layers: Sequence[Layer], cuts: Sequence[int]) -> Any:
    """The layers between cuts, added up: a `Layer` of arrays over the stages.

    `cut_bytes` is that of a stage's first layer.
    """
    starts = [0, *cuts]

    def column(name):
        values = np.array([getattr(layer, name) for layer in layers], float)
        if name == "cut_bytes":
            return values[starts]
        sums = np.add.reduceat(values, starts, axis=0).T
        return Work(*sums) if name in ("forward", "backward") else sums

    _, *names = (field.name for field in dataclasses.fields(Layer))
    return Layer("stages", *map(column, names))
