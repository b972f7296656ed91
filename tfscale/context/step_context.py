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
from typing import Any

import tensorflow as tf

_thread = threading.local()


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
        ranks: How layers use variables on model ranks, a `RankState`, or None.
    """

    batch_shard: Any = None
    moments: Any = None
    gradient_capture: Any = None
    update: "Update | None" = None
    ranks: Any = None

    @property
    def sees_one_device(self) -> bool:
        """Whether Keras is to see one replica.

        In a step on a shard, and in a function that is traced once for all
        replicas.
        """
        is_for_all = self.ranks is not None and self.ranks.replica is not None
        return is_for_all or self.batch_shard is not None

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
        reads_local_shards: Whether variables read as this replica's shards.
        norms: Norms of weights and gradients, by variable.
    """

    is_on_trial: bool = False
    is_in_branch: bool = False
    new_shards: dict = dataclasses.field(default_factory=dict)
    reads_local_shards: bool = False
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


def _in_this_graph(found):
    if found is None or found.graph is not tf.compat.v1.get_default_graph():
        return None
    return found


_NOTHING = Step()
