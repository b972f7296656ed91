"""The epochs of a `fit`, whose steps are followed.

Keras has one object for them, which makes an iterator for each epoch and gives
`fit` one step after the other. It is that of one `fit`.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from tfscale import in_place


@runtime_checkable
class Watcher(Protocol):
    """What is told, and asked, by epochs that are watched."""

    def iterator_made(self) -> None:
        """An iterator over the data is about to be made."""

    def begin_epoch(self) -> int:
        """An epoch begins; returns how many of its steps are done already."""

    def skip(self, iterator: Iterator[Any]) -> None:
        """A step of those is passed over."""

    def between_steps(self, step: int, iterator: Iterator[Any]) -> None:
        """All callbacks have ended the step before and none has begun this."""


class FollowedEpochs(in_place.Mixin):
    """Members of the epochs of a `fit`.

    Attributes:
        watcher: Who is told and asked, or None.
        on_step: Is called with the batches of each step, or None.
    """

    watcher: Watcher | None = None
    on_step: Callable[[int], None] | None = None

    def _get_iterator(self):
        if self.watcher is not None:
            self.watcher.iterator_made()
        return super()._get_iterator()

    def _enumerate_iterator(self):
        steps = super()._enumerate_iterator()
        return steps if self.watcher is None else self._watched(steps)

    def _watched(self, steps):
        done = self.watcher.begin_epoch()
        for step, end, iterator in steps:
            if step < done:
                self.watcher.skip(iterator)
                continue
            self.watcher.between_steps(step, iterator)
            yield step, end, iterator

    def __next__(self):
        if self.on_step is None:
            return super().__next__()  # who begins within has been told
        self.on_step(0)
        begin, end, iterator = super().__next__()
        self.on_step(end + 1 - begin)
        return begin, end, iterator


def watch(epochs: Any, watcher: Watcher) -> None:
    """Has epochs tell a watcher, until `unwatch`."""
    in_place.put(epochs, FollowedEpochs, watcher=watcher)


def unwatch(epochs: Any) -> None:
    """Has the epochs of a `fit` that has ended let their watcher go.

    That one knows them: both were left to the garbage collector, with the
    threads of TensorFlow's iterator.
    """
    epochs.watcher = None


def tell_steps(epochs: Any, on_step: Callable[[int], None]) -> None:
    """Calls a function with the batches of each step, before it is run.

    And with none after each, in place of an earlier function. It is called at
    once for the step whose iterator
    is being made.
    """
    is_first = getattr(epochs, "on_step", None) is None
    in_place.put(epochs, FollowedEpochs, on_step=on_step)
    if is_first:
        on_step(epochs.steps_per_execution)
