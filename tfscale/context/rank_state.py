"""The state of a model rank while Keras calls layers."""

import contextlib
import dataclasses
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.context import step_context


@dataclasses.dataclass(frozen=True)
class RankState:
    """The state of this thread while Keras calls layers; see `Step.ranks`.

    Attributes:
        devices: The devices of a strategy's call, if not one of each replica.
        graph: The graph in which ranks call layers and meet, or None.
        replica: The number of the replica, a tensor, in a function that is
            traced once for all of them; else None.
        reads_shards: Whether a sharded variable is this rank's shard.
        gradients_are_partial: Whether whole variables are used on a shard of
            something, so that their gradients are summed over the ranks.
        given_shards: Tensors that stand for shards, by `id(variable)`.
        seeds_are_for_shards: Whether random numbers are for a shard.
        model: The functional model whose decisions count, or None.
        sequence_plan: The plan of sequence parallelism, or None.
        recorder: The `Recorder` of a model that is only traced, or None.
        prepares_models: Whether this run searches for models to prepare.
    """

    devices: Sequence[str] | None = None
    graph: Any = None
    replica: Any = None
    reads_shards: bool = False
    gradients_are_partial: bool = False
    given_shards: MutableMapping[int, Any] = dataclasses.field(
        default_factory=dict
    )
    seeds_are_for_shards: bool = False
    model: Any = None
    sequence_plan: Any = None
    recorder: Any = None
    prepares_models: bool = False


def current() -> RankState:
    """The state of this thread."""
    return step_context.current().ranks or _NOTHING


def is_in_nested_graph() -> bool:
    """Whether this thread traces a branch, a loop or a function of a layer.

    Ranks cannot exchange values there.
    """
    graph = current().graph
    if graph is None or tf.executing_eagerly():
        return False
    return graph is not tf.compat.v1.get_default_graph()


def within(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, this thread's state has other attributes."""
    return step_context.within(ranks=dataclasses.replace(current(), **changes))


_NOTHING = RankState()
