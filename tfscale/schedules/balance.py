"""Cuts a chain of layers into stages of equal cost, exactly.

A cut is the index of the layer with which a stage begins: cuts `(2, 5)` of
seven layers give the stages `[0, 1]`, `[2, 3, 4]` and `[5, 6]`.
"""

import bisect
import collections
import itertools
import math
import operator
from collections.abc import Collection
from collections.abc import Sequence
from typing import NamedTuple

from tfscale.integers import check_integer
from tfscale.step_memory import held_bytes
from tfscale.step_memory import microbatch_peak


class LayerMemory(NamedTuple):
    """Bytes that a layer needs on its device during training.

    Args:
        fixed: Weights, their gradients and optimizer slots.
        activation: Bytes that its backward needs of one microbatch, its input
            included.
        stage_input: Bytes that cross a cut just before this layer, for one
            microbatch. Only used when stages recompute.
        working: Gradients that live only while its backward runs: a stage
            has those of one layer at a time.
        update: The most that the update of one of its weights needs, when there
            are no activations.
    """

    fixed: float
    activation: float
    stage_input: float = 0
    working: float = 0
    update: float = 0


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    allowed_cuts: Collection[int] | None = None,
    cut_bytes: Sequence[float] | None = None,
    stage_devices: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    tied: Sequence[tuple[Sequence[int], float]] = (),
    memory: Sequence[LayerMemory] | None = None,
    memory_limit: float | None = None,
    in_flight: int | Sequence[int] = 1,
    recompute: bool = False,
) -> tuple[int, ...]:
    """The contiguous partition whose most expensive stage is the cheapest.

    Found by dynamic programming over all partitions, so it is the optimum.
    Among equals it takes the one with the smallest sum of squared stage
    costs (the most even), then the fewest bytes over cuts, then the earliest
    cuts. Where several stages share a device, the load of a device is the sum
    of its stages: cuts are moved from this partition as long as the largest
    load falls. Layers that share weights stay on one device where that adds
    less to the largest load than the exchange of the weights costs.

    Args:
        costs: Cost of each layer in any unit, 0 or more; `int`s are compared
            exactly.
        num_stages: Number of stages; each gets at least one layer.
        allowed_cuts: Indices of the layers that may begin a stage.
        cut_bytes: For each layer, the bytes that cross a cut just before it.
        stage_devices: The device of each stage. Defaults to one each.
        speeds: The speed of each device: the same layers cost half on a device
            of twice the speed. Defaults to equal ones.
        tied: The layers that share some weights, and the cost, in the unit of
            `costs`, of these weights on one more device.
        memory: A `LayerMemory`, or a tuple like it, for each layer.
        memory_limit: Bytes that each stage may take. Where several stages
            share a device, pass the share of one.
        in_flight: Microbatches that each stage holds at once, see
            `peak_in_flight`; one number or one per stage.
        recompute: Whether stages keep only their inputs of microbatches in
            flight, and the activations of one.

    Raises:
        ValueError: If there are fewer layers (or places to cut) than the
            stages need, a cost is negative or not finite, or nothing fits
            the memory limit; the message then says what would.

    Example:

    >>> partition([4, 1, 1, 1, 1], num_stages=3)
    (1, 3)
    >>> partition([1, 1, 1, 1, 1, 1], num_stages=2, speeds=[1, 2])
    (2,)
    """
    _check_costs(costs, num_stages)
    num_layers = len(costs)
    if allowed_cuts is None:
        allowed_cuts = range(1, num_layers)
    allowed = sorted({c for c in allowed_cuts if 0 < c < num_layers})
    if len(allowed) < num_stages - 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cuts. Received: "
            f"{len(allowed)} places where the model may be cut: {allowed}. Use "
            f"at most {len(allowed) + 1} stages."
        )
    cost_before = [0, *itertools.accumulate(costs)]
    devices = tuple(stage_devices or range(num_stages))

    def cost(stage, start, stop):
        total = cost_before[stop] - cost_before[start]
        return total if speeds is None else total / speeds[devices[stage]]

    measure = cost
    if memory_limit is not None:
        stage_bytes = _stage_bytes(
            memory, num_layers, num_stages, in_flight, recompute
        )
        bounds = [0, *allowed, num_layers]
        needed, _ = _search(bounds, num_stages, stage_bytes, max)
        if needed > memory_limit:
            raise ValueError(
                f"Each of {num_stages} stages must fit the memory limit. "
                f"Received: memory_limit={memory_limit:,} bytes, but the cut "
                f"that needs least needs {needed:,} bytes in its largest "
                "stage. Use more stages, smaller microbatches, "
                "recompute=True, or a higher limit."
            )

        def measure(*stage):
            return cost(*stage) if stage_bytes(*stage) <= memory_limit else None

    def add(a, b):
        return tuple(map(operator.add, a, b))

    def best(allowed):
        """The best cuts of these, or None."""
        bounds = [0, *allowed, num_layers]
        found = _search(bounds, num_stages, measure, max)
        if found is None:
            return None
        largest, _ = found

        def evenness(stage, start, stop):
            measured = measure(stage, start, stop)
            if measured is None or measured > largest:
                return None
            boundary_bytes = cut_bytes[start] if cut_bytes and start else 0
            return measured**2, boundary_bytes

        _, cuts = _search(bounds, num_stages, evenness, add)
        if len(set(devices)) < num_stages:
            cuts = _balanced_devices(cuts, bounds, devices, measure)
        return cuts

    return _with_tied(best, allowed, tied, devices, num_layers, cost)


def _with_tied(best, allowed, tied, devices, num_layers, cost):
    """The best cuts, with layers that share weights together where that pays.

    It tries one pair of such layers after the other, those whose exchange costs
    most first.
    """

    def total(cuts):
        exchanged = 0
        for layers, exchange in tied:
            users = {devices[bisect.bisect(cuts, layer)] for layer in layers}
            if len(users) > 1:  # 0 x infinity is no number
                exchanged += (len(users) - 1) * exchange
        return _loads(cuts, num_layers, devices, cost)[0] + exchanged

    cuts = best(allowed)
    for layers, _ in sorted(tied, key=lambda each: -each[1]):
        for first, last in itertools.pairwise(sorted(layers)):
            together = [cut for cut in allowed if not first < cut <= last]
            if (
                any(first < cut <= last for cut in cuts)
                and any(
                    cost(stage, first, last + 1) < total(cuts)
                    for stage in range(len(devices))
                )
                and (other := best(together)) is not None
                and total(other) < total(cuts)
            ):
                allowed, cuts = together, other
    return cuts


def _loads(cuts, num_layers, devices, cost):
    loads = collections.Counter()
    for stage, bounds in enumerate(itertools.pairwise([0, *cuts, num_layers])):
        loads[devices[stage]] += cost(stage, *bounds)
    return sorted(loads.values(), reverse=True)


def _balanced_devices(cuts, bounds, devices, measure):
    """Moves cuts to the next bound while the largest device's load falls."""

    def loads(cuts):
        stages = enumerate(itertools.pairwise([0, *cuts, bounds[-1]]))
        if any(
            a == b or measure(stage, a, b) is None for stage, (a, b) in stages
        ):
            return [math.inf]
        return _loads(cuts, bounds[-1], devices, measure)

    best = loads(cuts)
    while True:
        moved = [
            (*cuts[:n], bounds[bounds.index(cuts[n]) + step], *cuts[n + 1 :])
            for n in range(len(cuts))
            for step in (-1, 1)
        ]
        found = min(moved, key=loads)
        if loads(found) >= best:
            return cuts
        cuts, best = found, loads(found)


def _check_costs(costs, num_stages):
    check_integer("num_stages", num_stages)
    if len(costs) < num_stages:
        raise ValueError(
            "Each stage needs at least one layer. Received: "
            f"{len(costs)} layers for num_stages={num_stages}. Use at most "
            f"{len(costs)} stages."
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                "Costs must be finite and not negative. Received: "
                f"{cost} for layer {index}."
            )


def _stage_bytes(memory, num_layers, num_stages, in_flight, recompute):
    """A function of (stage, start, stop): bytes of a stage of these layers."""
    if memory is None or len(memory) != num_layers:
        raise ValueError(
            "`memory_limit` needs `memory`, one entry per layer. Received: "
            f"{'none' if memory is None else len(memory)} for {num_layers} "
            "layers."
        )
    if isinstance(in_flight, int):
        in_flight = [in_flight] * num_stages
    if len(in_flight) != num_stages:
        raise ValueError(
            "`in_flight` must be one number or one per stage. Received: "
            f"{len(in_flight)} numbers for {num_stages} stages."
        )
    memory = [LayerMemory(*layer) for layer in memory]
    fixed_before = [0, *itertools.accumulate(m.fixed for m in memory)]
    activation_before = [0, *itertools.accumulate(m.activation for m in memory)]

    def most(of_layer):
        """The most from one layer up to another one."""
        each = list(map(of_layer, memory))
        return [
            list(itertools.accumulate(each[start:], max))
            for start in range(num_layers)
        ]

    working, update = most(lambda m: m.working), most(lambda m: m.update)

    def stage_bytes(stage, start, stop):
        last = stop - start - 1
        kept, again = held_bytes(
            activation_before[stop] - activation_before[start],
            memory[start].stage_input,
            recompute,
        )
        return (
            fixed_before[stop]
            - fixed_before[start]
            + microbatch_peak(
                kept * in_flight[stage] + again,
                working[start][last],
                update[start][last],
            )
        )

    return stage_bytes


def _search(bounds, num_stages, measure, combine):
    """Least combined measure over all stages, and the earliest cuts with it.

    `measure` of a stage is None where the stage must not be. `best[i]` is the
    least measure of the stages from `stage` on, when `stage` starts at
    `bounds[i]`: found for the last stage first.
    """
    end = len(bounds) - 1
    best = {end: (None, None)}
    tables = []
    for stage in reversed(range(num_stages)):
        rest, best = best, {}
        starts = [0] if stage == 0 else range(stage, end)
        for i in starts:
            for j in rest:
                if j <= i:
                    continue
                value = measure(stage, bounds[i], bounds[j])
                if value is None:
                    continue
                if j < end:
                    value = combine(value, rest[j][0])
                if i not in best or (value, j) < best[i]:
                    best[i] = (value, j)
        tables.append(best)
    if 0 not in best:
        return None
    cuts, i = [], 0
    for table in reversed(tables):
        i = table[i][1]
        cuts.append(bounds[i])
    return best[0][0], tuple(cuts[:-1])
