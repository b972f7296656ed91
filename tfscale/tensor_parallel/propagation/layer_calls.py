"""A traced model, and its calls of layers that run sharded by a rule.

The analysis of the graph does not look inside such a call: it sees which
outputs the layer could leave sharded and which inputs it could take sharded.
"""

import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.tensor_parallel.propagation import custom_gradients


@dataclasses.dataclass(frozen=True)
class Source:
    """An output that could stay sharded along `dim`; in full shape."""

    tensor: tf.Tensor
    dim: int


@dataclasses.dataclass(frozen=True)
class Sink:
    """An input, in full shape, that a layer can take sharded along `dim`.

    `propagates_to` is the output that is sharded if the input is (a depthwise
    convolution, a BatchNormalization); None if the output is whole.
    """

    tensor: tf.Tensor
    dim: int
    propagates_to: Source | None = None


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer that runs sharded by a rule.

    Of its operations, given by their indices, the analysis sees the tensors
    that are declared here: `inputs` and `outputs` are always whole, the sinks
    are sharded all together or not at all. With `shares_input` each rank uses a
    whole input for itself: its gradient may be summed where it was gathered.
    """

    key: Hashable
    operations: range
    sources: tuple[Source, ...] = ()
    sinks: tuple[Sink, ...] = ()
    inputs: tuple[tf.Tensor, ...] = ()
    outputs: tuple[tf.Tensor, ...] = ()
    shares_input: bool = False

    @property
    def passed_on(self) -> list[Source]:
        """The outputs that are sharded if the inputs are."""
        return [s.propagates_to for s in self.sinks if s.propagates_to]

    @property
    def made(self) -> list[Source]:
        """The outputs that may be sharded."""
        return [*self.sources, *self.passed_on]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced model: its graph, calls of sharded layers, and outputs."""

    graph: tf.Graph
    calls: Sequence[LayerCall]
    outputs: Sequence[tf.Tensor] = ()

    @property
    def operations(self) -> list:
        """The operations of the model, in the order in which it made them."""
        return custom_gradients.model_operations(self.graph)


def check_calls(trace: Trace, num_ranks: int) -> None:
    """Raises a `ValueError` if a call does not fit the graph."""
    operations = trace.operations
    if num_ranks < 2:
        raise ValueError(
            "Tensors are sharded over two ranks or more. "
            f"Received: num_ranks={num_ranks}."
        )
    made_at = {op.name: index for index, op in enumerate(operations)}
    end = 0
    for call in sorted(trace.calls, key=lambda call: call.operations.start):
        if call.operations.start < end or call.operations.step != 1:
            raise ValueError(
                "Layer calls cannot overlap: each operation belongs to one. "
                f"Received: operations={call.operations} of {call.key!r}, where"
                f" another call ends at {end}. Record outermost calls only."
            )
        end = max(end, call.operations.stop)
        before = range(call.operations.start)
        declared: list[Any] = [
            *((x, before, "An input", "before") for x in call.sinks),
            *((x, call.operations, "An output", "by") for x in call.made),
        ]
        for shard, made_in, what, when in declared:
            size = shard.tensor.shape[shard.dim]
            if not size or size % num_ranks:
                raise ValueError(
                    "A sharded dim has a known size that the number of ranks "
                    f"divides. Received: {call.key!r}, dim {shard.dim} of "
                    f"shape {shard.tensor.shape}, num_ranks={num_ranks}."
                )
            index = made_at.get(shard.tensor.op.name)
            if index not in made_in:
                raise ValueError(
                    f"{what} of a layer call is made {when} its operations. "
                    f"Received: {shard.tensor.name!r}, made at {index}, and "
                    f"operations={call.operations} of {call.key!r}."
                )
