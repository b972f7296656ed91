"""What a thread knows of the step that it runs.

Keras calls layers, losses and optimizers, and these call what tfscale has put
in their place: what one says to the other cannot be an argument. It is one
object, which belongs to the thread, because replicas and model ranks are
threads that run by turns. Where code of tfscale calls code of tfscale it is an
argument.
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
        batch_shard: The `whole_batch.BatchShard` that is worked on, or None.
        moments: Where BatchNormalization layers note what they saw, a
            `whole_batch.batch_norm.NotedMoments`, or None.
        gradient_capture: What takes gradients from optimizers, or None.
        update: The `Update` that is under way, or None: by an optimizer that
            applies summed gradients, or while weights are loaded on trial.
        is_one_replica: Whether Keras is told that there is one replica.
        ranks: How layers use variables on model ranks, a `RankState`, or None.
    """

    batch_shard: Any = None
    moments: Any = None
    gradient_capture: Any = None
    update: "Update | None" = None
    is_one_replica: bool = False
    ranks: Any = None

    @property
    def batch_shard_in_graph(self) -> Any:
        """`batch_shard`, where parts can be put together.

        It is None in a function or branch of its own, in which no replica
        meets another one.
        """
        return _in_this_graph(self.batch_shard)

    @property
    def moments_in_graph(self) -> Any:
        """`moments`, where those of parts can be put together; else None."""
        return _in_this_graph(self.moments)


@dataclasses.dataclass(frozen=True)
class Update:
    """Variables are updated, by summed gradients or on trial.

    Attributes:
        is_on_trial: Whether what is assigned is only checked.
        is_in_branch: Whether in a branch, where ranks can exchange nothing.
        new_shards: What has been assigned to parts of variables; see
            `zero.LocalShard`.
        reads_local_shards: Whether variables are this replica's parts.
        norms: Of weights and gradients that are updated, by variable.
    """

    is_on_trial: bool = False
    is_in_branch: bool = False
    new_shards: dict = dataclasses.field(default_factory=dict)
    reads_local_shards: bool = False
    norms: dict[int, Any] = dataclasses.field(default_factory=dict)


def current() -> Step:
    """That of this thread."""
    return getattr(_thread, "step", _NOTHING)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Within it, some attributes of this thread's step are others."""
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
