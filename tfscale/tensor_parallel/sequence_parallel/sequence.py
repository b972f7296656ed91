"""Sequence parallelism: activations sharded along the sequence between layers.

Between a row-parallel layer and the next column-parallel one, all ranks would
compute the same activations. Sharded along the sequence, each rank has a shard,
and the sum over ranks becomes

    row-parallel ─► reduce-scatter ─► Dropout, Add, norm ─► all-gather ─► column

which sends as much as the all-reduce that it replaces. Where tensors enter and
leave a layer is a `Boundary`; a `SequencePlan`, which sequence_analysis.py
makes, says which of them are gathered or sharded there:

    scatter       own part               backward: all parts
    all_gather    all parts, for what    backward: own part of the sum
                  each rank does itself
    gather        all parts, for what    backward: own part
                  all ranks do alike

Source: Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models (2022), section 4.2.2.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.adapters.layer import MeshLayer
from tfscale.adapters.layer import adapt_layer
from tfscale.collectives import rank_collectives
from tfscale.context import step_context


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of a tensor where it enters or leaves a layer.

    `mode` is "scatter", "all_gather" or "gather", along `dim`, in which the
    whole tensor has `size` entries.
    """

    mode: str
    dim: int
    size: int

    def fits(self, tensor: tf.Tensor, num_ranks: int) -> bool:
        """Whether a rank's tensor is whole, or a shard, as the mode expects."""
        whole = self.mode == "scatter"
        size = self.size if whole else self.size // num_ranks
        return tensor.shape[self.dim] == size

    def apply(self, tensor: tf.Tensor, gathered: dict) -> tf.Tensor:
        """The converted tensor, in replica context.

        `gathered` has, and gets, what is gathered in this call of the model.
        """
        if self.mode == "scatter":
            return rank_collectives.scatter_to_ranks(tensor, self.dim)
        if self.mode == "gather":
            return rank_collectives.gather_from_ranks(tensor, self.dim)
        # Queries, keys and values have one input: it is gathered once, and its
        # gradients are summed before they are sent.
        key = tensor.ref()
        if key not in gathered:
            gathered[key] = rank_collectives.all_gather(tensor, self.dim)
        return gathered[key]


@dataclasses.dataclass(frozen=True)
class SequencePlan:
    """The tensors that are sharded along the sequence, for shapes of inputs.

    Attributes:
        scatters: Full size of dim 1, by `id` of a layer that leaves its sum
            over ranks sharded along it.
        conversions: By `id` of a `Boundary` and position of the tensor.
        partial_gradients: Ids of the boundaries of layers that use whole
            weights on shards: the gradients are summed.
        sharded_generators: Ids of the states of generators that draw shards.
        sharded: Names of the layers that take and return shards.
        gathered: What is gathered from all ranks, by the reference of a rank's
            tensor, in one call of the model; see `for_call`.
    """

    scatters: Mapping[int, int]
    conversions: Mapping[tuple, Conversion]
    partial_gradients: frozenset[int]
    sharded_generators: frozenset[int]
    sharded: tuple[str, ...]
    gathered: dict[Any, tf.Tensor] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def for_call(self) -> "SequencePlan":
        """The plan of one call of the model, by one rank."""
        return dataclasses.replace(self, gathered={})


def current() -> SequencePlan | None:
    """The plan of this thread's model, or None."""
    return step_context.current().ranks.sequence_plan


def sum_over_ranks(layer, x: tf.Tensor) -> tf.Tensor:
    """The sum of a layer's terms, or this rank's shard of it."""
    if scatters(layer, x):
        return rank_collectives.reduce_scatter(x, 1)
    return rank_collectives.reduce_from_ranks(x)


def scatters(layer, x: tf.Tensor) -> bool:
    """Whether the sum of a layer's terms is left sharded."""
    plan = current()
    size = None if plan is None else plan.scatters.get(id(layer))
    return size is not None and x.shape.rank == 3 and x.shape[1] == size


def copy_to_region(x: tf.Tensor) -> tf.Tensor:
    """A whole input that each rank uses separately (f).

    Its gradient is summed over ranks, unless the gather does so. A sparse input
    is data, and has none.
    """
    plan = current()
    is_gathered = plan is not None and any(
        x is each for each in plan.gathered.values()
    )
    if is_gathered or isinstance(x, tf.SparseTensor):
        return x
    return rank_collectives.copy_to_ranks(x)


class Boundary:
    """A boundary around a method of a layer, which tensors enter and leave.

    With `of_shapes` the method only reads shapes of tensors, which have to be
    whole.
    """

    def __init__(self, layer, *, of_shapes: bool = False):
        self.layer = layer
        self.of_shapes = of_shapes

    def run(self, method: Callable, args, kwargs):
        """Calls a method, by the plan of this thread if there is one."""
        if step_context.is_in_nested_graph():
            return method(*args, **kwargs)
        recorder = step_context.current().ranks.recorder
        if recorder is not None:
            return recorder.run_with_edges(self, method, args, kwargs)
        plan, num_ranks = current(), rank_collectives.num_ranks()
        if plan is None or num_ranks == 1:
            return method(*args, **kwargs)

        def convert(position, tensor):
            conversion = plan.conversions.get((id(self), position))
            if conversion and conversion.fits(tensor, num_ranks):
                found = conversion.apply(tensor, plan.gathered)
                return with_mask(found, tensor)
            return tensor

        args, kwargs = map_inputs(convert, args, kwargs)
        are_partial = id(self) in plan.partial_gradients
        with step_context.within_ranks(gradients_are_partial=are_partial):
            outputs = method(*args, **kwargs)
        return map_outputs(convert, outputs)


def attach_boundaries(layer: keras.Layer) -> None:
    """Puts boundaries around `call`, and methods that read shapes; once."""
    if boundary_of(layer) is None:
        adapt_layer(
            layer,
            sequence_boundary=Boundary(layer),
            mask_boundary=Boundary(layer, of_shapes=True),
        )


def boundary_of(layer: keras.Layer) -> Boundary | None:
    """The boundary around the `call` of a layer, if there is one."""
    return layer.sequence_boundary if isinstance(layer, MeshLayer) else None


def with_mask(tensor, original):
    """A tensor with the Keras mask of another one."""
    mask = symbols.get_keras_mask(original)
    if mask is not None:
        symbols.set_keras_mask(tensor, mask)
    return tensor


def map_inputs(function: Callable, args, kwargs) -> tuple[tuple, dict]:
    """Maps tensors that could be sharded, by `function(position, tensor)`."""
    return (
        tuple(_map(function, ("in", i), arg) for i, arg in enumerate(args)),
        {name: _map(function, ("in", name), x) for name, x in kwargs.items()},
    )


def map_outputs(function: Callable, outputs) -> Any:
    """Maps tensors that a layer returns, and that could be sharded."""
    return _map(function, ("out",), outputs)


def _map(function, position, structure):
    flat = keras.tree.flatten(structure)
    if not any(map(_can_be_sharded, flat)):
        return structure
    mapped = [
        function((*position, index), x) if _can_be_sharded(x) else x
        for index, x in enumerate(flat)
    ]
    return keras.tree.pack_sequence_as(structure, mapped)


def _can_be_sharded(x):
    return (
        isinstance(x, tf.Tensor)
        and (x.dtype.is_floating or x.dtype.is_bool)
        and (x.shape.rank or 0) >= 2
    )
