"""What a thread does just now, for the model rank whose thread it is.

Keras calls layers and optimizers, and they call what tfscale has put in their
place: what one says to the other cannot be passed as an argument. It is one
object, which belongs to the thread, because model ranks are threads that run by
turns. Whoever changes it does so for a while:

    with rank_context.within(reads_shards=True):
        ...
        rank_context.current().shards.reads_shards
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Step:
    """What a training step knows, of a replica or of one of its microbatches.

    Made anew for whatever visits a part of a batch: a replica, a microbatch in
    a loop, a stage of a pipeline.

    Attributes:
        part: The `whole_batch.BatchPart` that is worked on, or None.
        moments: Where BatchNormalization layers note what they saw, a
            `whole_batch.batch_norm.NotedMoments`, or None.
        gradient_capture: Who takes gradients from optimizers, or None.
        replica: The number of the replica, a tensor, in a function that is
            traced once for all of them; else None.
        is_one_replica: Whether Keras is told that there is one replica.
    """

    part: Any = None
    moments: Any = None
    gradient_capture: Any = None
    replica: Any = None
    is_one_replica: bool = False

    @property
    def part_here(self) -> Any:
        """`part`, where parts can be put together.

        It is None in a function or branch of its own, in which no replica
        meets another one.
        """
        return _in_this_graph(self.part)

    @property
    def moments_here(self) -> Any:
        """`moments`, where those of parts can be put together; else None."""
        return _in_this_graph(self.moments)


@dataclasses.dataclass(frozen=True)
class Update:
    """How variables are assigned to.

    Attributes:
        gradients_are_reduced: Whether gradients are summed over replicas.
        applies_gradients: Whether an optimizer is applying them.
        applies_in_branch: Whether it applies them in a branch, where ranks
            cannot exchange anything.
        norms: Of weights and gradients that are updated, by variable.
        updates_parts: Whether updates are of a replica's part of variables.
        new_parts: What has been assigned to such parts; see `zero.LocalShard`.
    """

    gradients_are_reduced: bool = False
    applies_gradients: bool = False
    applies_in_branch: bool = False
    norms: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    updates_parts: bool = False
    new_parts: MutableMapping[Any, Any] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where ranks are called.

    Attributes:
        devices: The devices that a strategy calls a function on, if not on one
            of each replica.
        graph: The graph in which the ranks meet, if there is one.
    """

    devices: Sequence[str] | None = None
    graph: Any = None


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a rank uses variables.

    Attributes:
        reads_shards: Whether a sharded variable is this rank's shard.
        gradients_are_partial: Whether whole variables are used on a part of
            something, so that their gradients are summed over the ranks.
        given_shards: Tensors that stand for shards, by `id(variable)`.
        seeds_are_for_shards: Whether random numbers are for a part of a tensor.
    """

    reads_shards: bool = False
    gradients_are_partial: bool = False
    given_shards: MutableMapping[int, Any] = dataclasses.field(
        default_factory=dict
    )
    seeds_are_for_shards: bool = False


@dataclasses.dataclass(frozen=True)
class Calls:
    """By what layers with sharded variables are called, or looked at.

    Attributes:
        model: The functional model whose decisions count, or None.
        sequence_plan: What layers divide along the sequence, or None.
        recorder: The `Recorder` of a model that is only looked at, or None.
        prepares_models: Whether this is a run that looks for models to prepare.
    """

    model: Any = None
    sequence_plan: Any = None
    recorder: Any = None
    prepares_models: bool = False


@dataclasses.dataclass(frozen=True)
class RankContext:
    """All that holds for a while."""

    step: Step = dataclasses.field(default_factory=Step)
    update: Update = dataclasses.field(default_factory=Update)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    shards: Shards = dataclasses.field(default_factory=Shards)
    calls: Calls = dataclasses.field(default_factory=Calls)


def current() -> RankContext:
    """That of this thread."""
    return getattr(_thread, "context", _NOTHING)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Within it, groups or single attributes of them, by name, are others."""
    before = current()
    groups: dict[str, Any] = {}
    for name, value in changes.items():
        group = _GROUPS.get(name)
        if group is None:
            groups[name] = value
        else:
            known = groups.get(group, getattr(before, group))
            groups[group] = dataclasses.replace(known, **{name: value})
    _thread.context = dataclasses.replace(before, **groups)
    try:
        yield
    finally:
        _thread.context = before


def _in_this_graph(found):
    if found is None or found.graph is not tf.compat.v1.get_default_graph():
        return None
    return found


_NOTHING = RankContext()
_GROUPS = {
    attribute.name: group.name
    for group in dataclasses.fields(RankContext)
    for attribute in dataclasses.fields(getattr(_NOTHING, group.name))
}
