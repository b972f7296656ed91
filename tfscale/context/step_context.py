"""The context of the training step that a thread runs.

Keras calls layers, losses and optimizers, whose classes are of tfscale, and
passes no further arguments. So they share one object per thread: replicas and
model ranks are threads that take turns. Code of tfscale that calls code of
tfscale passes arguments.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class RankState:
    """How a thread, a model rank, uses variables while Keras calls layers.

    Attributes:
        devices: The devices of a strategy's call, if not one of each replica.
        graph: The graph in which ranks call layers and meet, or None.
        replica: The number of the replica, a tensor, in a function that is
            traced once for all of them; else None.
        reads_shards: Whether a sharded variable is this rank's shard and, in
            an update, this replica's.
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


@dataclasses.dataclass(frozen=True)
class Shared:
    """Traces of the first replica, for all.

    Attributes:
        updates: The `SharedUpdates`, or None.
        call: The `SharedCall`, or None.
    """

    updates: Any = None
    call: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of a replica, or of one of its microbatches.

    Attributes:
        batch_shard: The `step.BatchShard` of the step, or None.
        moments: The `step.batch_norm.NotedMoments` of BatchNormalization
            layers, or None.
        gradient_capture: The `GradientCapture` of a microbatch, or None.
        update: The current `Update`, or None: of an optimizer that applies
            summed gradients, or of weights that are loaded on trial.
        ranks: How layers use variables on model ranks.
        shared: Traces that replicas share.
    """

    batch_shard: Any = None
    moments: Any = None
    gradient_capture: Any = None
    update: "Update | None" = None
    ranks: RankState = RankState()
    shared: Shared = Shared()

    @property
    def sees_one_device(self) -> bool:
        """Whether Keras is to see one replica.

        In a step on a shard, and in a function that is traced once for all
        replicas.
        """
        return self.ranks.replica is not None or self.batch_shard is not None

    @property
    def batch_shard_in_graph(self) -> Any:
        """`batch_shard`, where replicas can exchange values.

        It is None in a separate function or branch, where they cannot.
        """
        return _in_this_graph(self.batch_shard)

    @property
    def moments_in_graph(self) -> Any:
        """`moments`, where replicas can exchange values; else None."""
        return _in_this_graph(self.moments)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of variables, by summed gradients or on trial.

    Attributes:
        is_on_trial: Whether what is assigned is only checked.
        is_in_branch: Whether it is in a branch, where ranks exchange nothing.
        new_shards: New values of local shards; see `local_shard.LocalShard`.
        norms: Norms of weights and gradients, by variable.
    """

    is_on_trial: bool = False
    is_in_branch: bool = False
    new_shards: dict = dataclasses.field(default_factory=dict)
    norms: dict[int, Any] = dataclasses.field(default_factory=dict)


def current() -> Step:
    """The step of this thread."""
    return getattr(_thread, "step", _NOTHING)


def num_replicas() -> int:
    """Number of replicas of all workers, also where Keras is to see one."""
    strategy = tf.distribute.get_strategy()
    found = getattr(strategy.extended, "num_all_replicas", None)
    return strategy.num_replicas_in_sync if found is None else found


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Within it, this thread's step has other attributes."""
    before = current()
    _thread.step = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        _thread.step = before


def within_ranks(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, this thread's model rank has other attributes."""
    return within(ranks=dataclasses.replace(current().ranks, **changes))


def is_in_nested_graph() -> bool:
    """Whether this thread traces a branch, a loop or a function of a layer.

    Ranks cannot exchange values there.
    """
    graph = current().ranks.graph
    if graph is None or tf.executing_eagerly():
        return False
    return graph is not tf.compat.v1.get_default_graph()


def _in_this_graph(found):
    if found is None or found.graph is not tf.compat.v1.get_default_graph():
        return None
    return found


_NOTHING = Step()
