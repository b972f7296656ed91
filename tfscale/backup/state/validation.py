"""The position of the validation of a run in its data."""

import logging
from typing import Any

from tfscale.adapters.epochs import follow
from tfscale.backup.exactness import warn_of_inexact
from tfscale.backup.state.data_position import DataPosition


class Validation:
    """Counts the batches of validation; a `Watcher` too.

    Args:
        epochs: The new epoch iterator over the validation data.
        num_probes: Iterators that Keras has created of it already, to look at a
            batch before each validation.
    """

    def __init__(self, epochs, num_probes):
        self._epochs = epochs
        self._position = DataPosition(epochs)
        self._num_probes = num_probes
        for _ in range(num_probes):
            self._position.iterator_made()
            self._position.drawn(1)
        self._done = 0
        self._has_begun = False
        self._identity = self._position.identity()
        warn_of_inexact(epochs, "validation", num_probes)
        follow(epochs, watcher=self)

    def begin(self) -> None:
        """Called when a validation begins, and not for a look at a batch."""
        self._has_begun = True

    def resume(self, state: dict[str, Any]) -> None:
        """Returns to the position after an earlier process' last validation.

        Other data is only logged: training does not depend on it.
        """
        if self._identity != state["identity"]:
            logging.warning(
                "The validation data is not what it was: %s, saved %s.",
                self._identity,
                state["identity"],
            )
            return
        self._position.resume_after(state, self._num_probes)

    def state(self) -> dict[str, Any]:
        """The state of `DataPosition`, with the identity of the data."""
        return {**self._position.state(), "identity": self._identity}

    def ended(self, batch: int) -> None:
        """A batch was evaluated."""
        self._position.drawn(batch + 1 - self._done)
        self._done = batch + 1

    def end(self) -> None:
        """`fit` has ended."""
        follow(self._epochs, watcher=None)

    def iterator_made(self) -> None:
        """See `Watcher`."""
        self._position.iterator_made()

    def begin_epoch(self) -> int:
        """See `Watcher`."""
        self._done = 0
        return 0

    def skip(self, iterator: Any) -> None:
        """See `Watcher`: there is nothing to skip."""

    def between_steps(self, step: int, iterator: Any) -> None:
        """See `Watcher`; Keras draws a batch before a validation begins."""
        if step == 0 and not self._has_begun:
            self._position.drawn(1)
        self._has_begun = False
