"""The steps of a `fit`, and their sums: examples, seconds, wait for input."""

import dataclasses
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

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


@dataclasses.dataclass
class Meter:
    """The sums of some steps; in `waited` seconds they had no input."""

    num_batches: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(
        self,
        begin: float,
        end: float,
        asked: Sequence[float],
        arrivals: Sequence[float],
        rows: int,
        tokens: int,
    ) -> None:
        """Adds the batches that one call of the train function took.

        Times are seconds of one clock that is never set: of the call, and when
        each batch was asked for and arrived.
        """
        self.num_batches += len(arrivals)
        self.rows += rows
        self.tokens += tokens
        self.seconds += max(end - begin, 0.0)
        self.waited += waiting(begin, end, asked, arrivals)


def waiting(
    begin: float,
    end: float,
    asked: Sequence[float],
    arrivals: Sequence[float],
) -> float:
    """Seconds that a call waited for its batches.

    Each batch takes the same time c, after it has arrived and the batch before
    it is done:

        arrivals           0          1
        batches     ─ wait ─[── c ──]─ wait ─[── c ──]
                  begin                             end

    So `end` is the latest of `arrival(i) + (n - i) c`, which gives c. Nothing
    waits before a batch was asked for, which takes some time after `begin`.

    >>> waiting(0.0, 4.0, [0.0, 2.5], [1.0, 2.5])
    1.0
    """
    count = len(arrivals)
    if not count or end <= begin:
        return 0.0
    arrivals = [min(max(arrival, begin), end) for arrival in arrivals]
    each = min((end - a) / (count - i) for i, a in enumerate(arrivals))
    made = sum(
        max(arrival - max(since, begin), 0.0)
        for since, arrival in zip(asked, arrivals)
    )
    return min(max(end - begin - count * each, 0.0), made)


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
