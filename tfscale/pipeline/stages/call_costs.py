"""Costs of each call of a model: work, memory, and weights that it shares."""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.memory import training_bytes


class CallCosts(NamedTuple):
    """One number for each call, or stage, of a model.

    `backward` is the cost of B and W together, `weight` that of W.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]

    @property
    def training(self) -> list[float]:
        """The cost of all three."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def counted_costs(graph: Graph) -> CallCosts:
    """Costs in FLOPs, by those of the forwards.

    The gradients of inputs, and those of weights, take as much as the forward.
    Without trainable layers before it a call needs no gradient of its inputs;
    it counts where its weights are trained, as the first layer is small.
    """
    backward, weight = [], []
    differentiable = graph.differentiable()
    for call in graph.calls:
        variables = call.variables
        trains = any(variable.trainable for variable in variables)
        passes = not differentiable.isdisjoint(call.inputs)
        # Both operands of a product of activations have a gradient.
        times = 2 if trains or not variables else 1
        backward.append(times * call.flops if trains or passes else 0)
        weight.append(call.flops if trains else 0)
    return CallCosts([call.flops for call in graph.calls], backward, weight)


def cut_bytes(graph: Graph) -> list[int]:
    """Bytes that cross a cut just before each call, unknown sizes as 1."""
    last_use = {v: i for i, call in enumerate(graph.calls) for v in call.inputs}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.calls) - 1))
    totals = [0] * len(graph.calls)
    for index, call in enumerate(graph.calls):
        for value in call.outputs:
            spec = graph.specs[value]
            sizes = (size or 1 for size in spec.shape)
            size = math.prod(sizes) * tf.as_dtype(spec.dtype).size
            for cut_before in range(index + 1, last_use.get(value, index) + 1):
                totals[cut_before] += size
    return totals


def parameters(graph: Graph) -> list[float]:
    """Parameters of each call's layer; of a layer called twice, once."""
    seen, counts = set(), []
    for call in graph.calls:
        new = [v for v in call.variables if id(v) not in seen]
        seen.update(map(id, new))
        counts.append(sum(math.prod(v.shape) for v in new))
    return counts


def tied_weights(graph: Graph) -> dict[tuple[int, ...], int]:
    """Bytes of the weights, and gradients, that each set of calls shares."""
    users: dict[int, tuple[keras.Variable, dict[int, None]]] = {}
    for index, call in enumerate(graph.calls):
        for variable in call.variables:
            users.setdefault(id(variable), (variable, {}))[1][index] = None
    tied: collections.Counter[tuple[int, ...]] = collections.Counter()
    for variable, calls in users.values():
        if len(calls) > 1:
            weights, gradients, _ = training_bytes([variable])
            tied[tuple(calls)] += weights + gradients
    return tied
