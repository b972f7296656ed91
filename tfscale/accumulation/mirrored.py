"""MirroredStrategy, in which Keras can be told that there is one replica."""

import contextlib
from collections.abc import Iterator

from tfscale import in_place
from tfscale import rank_context


class MirroredAsOne(in_place.Mixin):
    """A mixin for the class of the strategy's `extended`.

    A `MeshStrategy` has this itself, see `distribute/model_ranks.py`.
    """

    @contextlib.contextmanager
    def as_one_replica(self) -> Iterator[None]:
        """Within it Keras in this thread sees one replica."""
        with rank_context.within(is_one_replica=True):
            yield

    @property
    def _num_replicas_in_sync(self):
        if rank_context.current().step.is_one_replica:
            return 1
        return super()._num_replicas_in_sync
