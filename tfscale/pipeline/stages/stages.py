"""Stages: contiguous ranges of a model's calls, and what crosses the cuts."""

import dataclasses

import keras

from tfscale.pipeline.stages.graph import Call
from tfscale.pipeline.stages.graph import Graph
from tfscale.pipeline.stages.graph import Value


@dataclasses.dataclass(frozen=True)
class Stage:
    """The calls of one stage, and its tensors and variables, each once.

    Inputs are those of the model, or values of any earlier stage: a skip
    connection goes straight to where it is used. Outputs are values that later
    stages use; of the last stage, the outputs of the model.
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
    calls_of = [graph.calls[a:b] for a, b in zip(starts, stops)]
    used = []
    for index, calls in enumerate(calls_of):
        for call in calls:
            made_in.update(dict.fromkeys(call.outputs, index))
        inputs = [v for call in calls for v in call.inputs]
        if index == len(cuts):
            inputs += graph.outputs
        used.append([v for v in dict.fromkeys(inputs) if made_in[v] < index])
    stages = []
    for index, calls in enumerate(calls_of):
        later = dict.fromkeys(v for values in used[index + 1 :] for v in values)
        outputs = tuple(v for v in later if made_in[v] == index)
        if index == len(cuts):
            outputs = graph.outputs
        # Keras variables compare by value, so their ids are compared.
        variables = {id(v): v for call in calls for v in call.variables}
        stages.append(
            Stage(
                index,
                calls,
                tuple(used[index]),
                outputs,
                tuple(variables.values()),
            )
        )
    return stages
