"""The epochs of a `fit`, whose steps are watched.

In each `fit` Keras has one object for them, which creates an iterator for each
epoch and gives `fit` one step after the other.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from tfscale._internals import in_place


@runtime_checkable
class Watcher(Protocol):
    """The interface of objects that watch the epochs of a `fit`."""

    def iterator_made(self) -> None:
        """Called before an iterator over the data is created."""

    def begin_epoch(self) -> int:
        """Called when an epoch begins; returns the number of finished steps."""

    def skip(self, iterator: Iterator[Any]) -> None:
        """Skips a finished step."""

    def between_steps(self, step: int, iterator: Iterator[Any]) -> None:
        """Called after the callbacks of a step, before those of the next."""


class FollowedEpochs(in_place.Mixin):
    """Members of the epochs of a `fit`.

    Attributes:
        watcher: The `Watcher`, or None.
        around_steps: Returns a context in which all steps of an epoch run, with
            the callbacks between them.
        on_iterator: Called before an iterator over the data is created, or
            None.
        num_drawn: The batches that were drawn from the iterator of the last
            step, before that step.
    """

    watcher: Watcher | None = None
    around_steps: Callable[[], Any] = contextlib.nullcontext
    on_iterator: Callable[[], None] | None = None
    num_drawn = 0
    _num_with_step = 0
    # How many steps of an epoch are finished; None before it begins.
    _done: int | None = 0

    @contextlib.contextmanager
    def catch_stop_iteration(self):
        """See `EpochIterator`; Keras' context around the steps of an epoch."""
        with super().catch_stop_iteration(), self.around_steps():
            yield

    def _get_iterator(self):
        if self.watcher is not None:
            self.watcher.iterator_made()
        if self.on_iterator is not None:
            self.on_iterator()
        self._num_with_step = 0
        return super()._get_iterator()

    def __iter__(self):
        self._done = None
        return super().__iter__()

    def __next__(self):
        if self._done is None:
            watcher = self.watcher
            self._done = 0 if watcher is None else watcher.begin_epoch()
        begin, end, iterator = super().__next__()
        if self.watcher is not None:
            while begin < self._done:
                self.watcher.skip(iterator)
                self._draw(end + 1 - begin)
                begin, end, iterator = super().__next__()
            self.watcher.between_steps(begin, iterator)
        self._draw(end + 1 - begin)
        return begin, end, iterator

    def _draw(self, count):
        self.num_drawn = self._num_with_step
        self._num_with_step += count


def follow(epochs: Any, **attributes: Any) -> None:
    """Sets attributes of `FollowedEpochs`, for all later steps and iterators.

    At the end of a `fit` its watcher is released by None. It refers to the
    epochs: the garbage collector would free both late, with the threads of
    TensorFlow's iterator.
    """
    in_place.put(epochs, FollowedEpochs, **attributes)
