"""A traced model, and its calls of layers that run sharded by a rule.

The analysis of the graph does not look inside such a call: it sees which
outputs the layer could leave sharded and which inputs it could take sharded.
"""

import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence

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
