"""How the layers that a model rank calls run, and use variables."""

import contextlib
import dataclasses
from collections.abc import Iterator
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

from tfscale import step_context


@dataclasses.dataclass(frozen=True)
class RankState:
    """What holds for this thread while Keras calls layers; see `Step.ranks`.

    Attributes:
        devices: The devices that a strategy calls a function on, if not on one
            of each replica.
        graph: The graph in which the ranks meet, if there is one.
        replica: The number of the replica, a tensor, in a function that is
            traced once for all of them; else None.
        reads_shards: Whether a sharded variable is this rank's shard.
        gradients_are_partial: Whether whole variables are used on a shard of
            something, so that their gradients are summed over the ranks.
        given_shards: Tensors that stand for shards, by `id(variable)`.
        seeds_are_for_shards: Whether random numbers are for a shard.
        model: The functional model whose decisions count, or None.
        sequence_plan: What layers divide along the sequence, or None.
        recorder: The `Recorder` of a model that is only looked at, or None.
        prepares_models: Whether this is a run that looks for models to prepare.
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
    """That of this thread."""
    return step_context.current().ranks or _NOTHING


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Within it, some attributes of this thread's state are others."""
    ranks = dataclasses.replace(current(), **changes)
    with step_context.within(ranks=ranks):
        yield


_NOTHING = RankState()
