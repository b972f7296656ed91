"""The steps of a `fit`, from their beginning to their results."""

import threading
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from tfscale.throughput.meter import Meter
from tfscale.throughput.noted_data import NotedData

# Two clocks differ by more if one was set meanwhile; arrivals have the one that
# can be set.
_SET = 1e-3


class _Begun(NamedTuple):
    """A call of the train function: when it began, and what it takes.

    Attributes:
        lead: How far the clock of arrivals is ahead.
        number: The number of its first batch in the iterator.
    """

    time: float
    lead: float
    iterator: int
    number: int
    num_batches: int
    function: Any


class Steps:
    """Adds up the steps of a `fit`, but for the first one of each shape.

    Keras may call `end` in other threads, and begin a step before the results
    of the last one are there: a step counts from then on.

        begin 0      begin 1         begin 2
        [─────── step 0 ───────][─────── step 1 ───────]
                             end 0                  end 1
    """

    def __init__(self, data: NotedData):
        self._data = data
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        self._done: list[tuple[_Begun, float, float]] = []
        self._end = 0.0
        self._function: Any = None
        self._shapes: set[int] = set()
        self.meter = Meter()

    @property
    def has_begun(self) -> bool:
        """Whether a step has ended, which has traced what it runs."""
        return bool(self._shapes)

    def begin_epoch(self) -> None:
        """Begins with new sums."""
        self._begun = {}
        self.meter = Meter()

    def begin(self, number: int, batch: int, count: int, function: Any) -> None:
        """Notes that a step begins.

        `number` is the first of its batches in the epoch, `batch` in the
        iterator, `count` the most that it takes. Another `function` is traced.
        """
        now = time.monotonic()
        lead = time.time() - now
        arrivals = self._data.arrivals
        iterator = 0 if arrivals is None else arrivals.iterator
        self._begun[number] = _Begun(
            now, lead, iterator, batch, count, function
        )

    def end(self, number: int) -> float:
        """Notes that a step has ended; the time."""
        now = time.monotonic()
        lead = time.time() - now
        with self._lock:
            begun = self._begun.pop(number, None)
            if begun is not None:
                self._done.append((begun, now, lead))
        return now

    def add_up(
        self, then: Callable[[Meter], None] = lambda meter: None
    ) -> None:
        """Adds the steps that have ended; calls a function with the sums."""
        with self._lock:
            arrived = None
            if self._done and self._data.arrivals is not None:
                arrived = self._data.arrivals.read()
            for begun, end, lead in sorted(self._done, key=lambda x: x[1]):
                self._add(begun, end, lead, arrived)
                self._end = end
            self._done = []
            then(self.meter)

    def _add(self, begun, end, lead, arrived):
        begin = max(begun.time, self._end)
        if begun.function is not self._function:
            self._function = begun.function
            self._shapes.clear()
        if arrived is None:
            count = begun.num_batches
            rows, tokens = (count * n for n in self._data.known_sizes)
            asked = arrivals = [begin] * count
            shapes = {0}
        else:
            batches = [
                arrived(begun.iterator, begun.number + index)
                for index in range(begun.num_batches)
            ]
            # At the end of the data there are fewer.
            batches = [batch for batch in batches if batch is not None]
            rows = sum(batch.rows for batch in batches)
            tokens = sum(batch.tokens for batch in batches)
            asked = [batch.asked - begun.lead for batch in batches]
            arrivals = [batch.time - begun.lead for batch in batches]
            shapes = {batch.shape for batch in batches}
        is_first = not shapes <= self._shapes
        self._shapes |= shapes
        if is_first or not rows:
            return
        # No batch arrives after the step: if one seems to, the clock was set
        # since it did.
        if abs(lead - begun.lead) <= _SET and max(arrivals) <= end + _SET:
            self.meter.add(begin, end, asked, arrivals, rows, tokens)
