"""Stages: contiguous ranges of a model's calls, and what crosses the cuts."""

import dataclasses

import keras

from tfscale.pipeline.stages.graph import Call
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value


@dataclasses.dataclass(frozen=True)
class Stage:
    """The calls of one stage, and its tensors and variables.

    Attributes:
        index: The stage's number, from 0.
        calls: In the order in which they run.
        inputs: Inputs of the model, or values of any earlier stage: a skip
            connection goes straight to where it is used.
        outputs: Values that later stages use; of the last stage, the outputs
            of the model.
        variables: Those that the calls use, each once.
    """

    index: int
    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    variables: tuple[keras.Variable, ...]

    @property
    def trainable(self) -> tuple[keras.Variable, ...]:
        """The variables that are trainable now."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def state(self) -> tuple[keras.Variable, ...]:
        """The others: statistics, states of random generators, frozen ones."""
        return tuple(v for v in self.variables if not v.trainable)

    @property
    def layers(self) -> list[str]:
        """Names of the layers called, each once."""
        return list(dict.fromkeys(call.name for call in self.calls))


def cut(graph: Graph, cuts: tuple[int, ...]) -> list[Stage]:
    """Cuts a model before each of some increasing indices of `graph.calls`.

    The last stage gets, and gives, every output of the model, wherever it is
    made, because the loss is computed there.
    """
    starts = (0, *cuts)
    stops = (*cuts, len(graph.calls))
    made_in = dict.fromkeys(graph.inputs, -1)
    for index, (start, stop) in enumerate(zip(starts, stops)):
        for call in graph.calls[start:stop]:
            made_in.update(dict.fromkeys(call.outputs, index))
    last = len(starts) - 1
    used = []
    for index, (start, stop) in enumerate(zip(starts, stops)):
        inputs = [v for call in graph.calls[start:stop] for v in call.inputs]
        if index == last:
            inputs += graph.outputs
        used.append([v for v in _unique(inputs) if made_in[v] < index])
    stages = []
    for index, (start, stop) in enumerate(zip(starts, stops)):
        calls = graph.calls[start:stop]
        variables = _unique(v for call in calls for v in call.variables)
        later = _unique(v for values in used[index + 1 :] for v in values)
        stages.append(
            Stage(
                index=index,
                calls=calls,
                inputs=tuple(used[index]),
                outputs=tuple(graph.outputs)
                if index == last
                else tuple(v for v in later if made_in[v] == index),
                variables=tuple(variables),
            )
        )
    return stages


def _unique(items):
    # Keras variables compare by value, so their ids are compared.
    return list(
        {
            id(x) if isinstance(x, keras.Variable) else x: x for x in items
        }.values()
    )
