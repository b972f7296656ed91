"""Adds up steps: examples, tokens, seconds, and the wait for input."""

import dataclasses
from collections.abc import Sequence


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
