"""Progress per second of a number of replicas and a batch size.

Goodput is rows per second times how much a row helps (Qiao et al.: Pollux,
OSDI 2021, section 3). With k = batch / start, |G|^2 and S of the noise scale
for batches of `start` rows:

    efficiency = (S + |G|^2) / (S / k + |G|^2) / k
    T = (T_c^g + T_n^g)^(1/g)
    T_c = a_c + b_c * rows of a replica        T_n = a_n + b_n * max(R - 2, 0)

g is 1 where nothing overlaps, and large where all does.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

_NOTHING = 1e-8  # seconds
_OVERLAPS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_NUM_SIZES = 50
_NUM_ROUNDS = 60
_MOST_DAMPING = 1e6


class StepTimes(NamedTuple):
    """The parameters of the time of a step, in seconds."""

    compute: float
    compute_per_row: float
    exchange: float
    exchange_per_replica: float
    overlap: float = 1.0

    def seconds(self, replicas: Any, rows: Any) -> np.ndarray:
        """Seconds of a step; arguments are integers or arrays of them.

        `rows` are those of a replica.
        """
        computing = self.compute + self.compute_per_row * np.asarray(rows)
        more = np.maximum(np.asarray(replicas) - 2, 0)
        sending = np.where(
            np.asarray(replicas) > 1,
            self.exchange + self.exchange_per_replica * more,
            _NOTHING,
        )
        # Of logarithms: a power of small seconds would be zero.
        both = np.logaddexp(
            self.overlap * np.log(computing), self.overlap * np.log(sending)
        )
        return np.exp(both / self.overlap)


def efficiency(
    batch_size: Any, start: int, square: float, variance: float
) -> np.ndarray:
    """Progress of a row, from 0 to 1, where one of batches of `start` has 1.

    `square` and `variance` are |G|^2 and S / start: of the gradient of a batch
    of `start` rows.
    """
    ratio = np.asarray(batch_size) / start
    if square + variance <= 0.0:
        return 1.0 / ratio
    return (variance + square) / (variance / ratio + square) / ratio


class Goodput(NamedTuple):
    """Progress in rows of batches of `start` per second.

    Example: where sending takes no time, and noise is all there is, two
    replicas make twice the progress.

    >>> times = StepTimes(0.0, 0.01, 1e-9, 0.0)
    >>> goodput = Goodput(times, start=8, square=0.0, variance=1.0)
    >>> [round(float(goodput.of(replicas, 8))) for replicas in (1, 2)]
    [100, 200]
    """

    times: StepTimes
    start: int
    square: float
    variance: float

    def of(self, replicas: Any, rows: Any) -> np.ndarray:
        """The goodput of steps; arguments as in `StepTimes.seconds`."""
        batch = np.asarray(replicas) * rows
        useful = efficiency(batch, self.start, self.square, self.variance)
        return batch * useful / self.times.seconds(replicas, rows)

    def best(self, replicas: int, largest: int) -> float:
        """The best goodput of some replicas; 0 if they are too many.

        Batches have `start` to `largest` rows, about.
        """
        least = max(self.start, replicas)
        if least > largest:
            return 0.0
        sizes = np.geomspace(least, largest, _NUM_SIZES)
        # The tolerance is of the rounding of `geomspace`.
        each = np.unique(np.ceil(sizes / replicas - 1e-8).astype(int))
        return float(np.max(self.of(replicas, each)))


def fitted_times(
    replicas: Sequence[int], rows: Sequence[int], seconds: Sequence[float]
) -> StepTimes:
    """The times of steps, from some that were measured.

    It minimizes the squares of the errors of logarithms. A parameter that no
    measurement shows is optimistic, so more replicas are tried: half of
    the time grows with the rows if all steps had as many, and exchanges take
    none before there were two replicas.
    """
    count, size = np.asarray(replicas), np.asarray(rows)
    logs, mean = np.log(seconds), float(np.mean(seconds))
    values = np.array(
        [mean / 2, mean / 2 / np.mean(size), mean / 10, mean / 99]
    )
    are_free = np.array(
        [np.ptp(size) > 0, True, np.any(count > 1), np.any(count > 2)]
    )
    values[2:][~are_free[2:]] = _NOTHING

    def times_of(logs_of_values, overlap):
        return StepTimes(*map(float, np.exp(logs_of_values)), overlap)

    def errors(free, overlap):
        point = np.log(values)
        point[are_free] = free
        predicted = times_of(point, overlap).seconds(count, size)
        # With too few measurements the smaller change is the better one.
        prior = 1e-3 * (free - np.log(values)[are_free])
        return np.concatenate([np.log(predicted) - logs, prior])

    def times_and_cost(overlap, start):
        free, error = _least_squares(lambda x: errors(x, overlap), start)
        point = np.log(values)
        point[are_free] = free
        # Where several explain the times, the one without overlap.
        return error + 1e-6 * (overlap - 1.0), times_of(point, overlap), free

    first = np.log(values)[are_free]
    found = [times_and_cost(_OVERLAPS[0], first)]
    for overlap in _OVERLAPS[1:]:
        for start in (first, found[-1][2]):  # there are several minima
            found.append(times_and_cost(overlap, start))
    return min(found, key=lambda each: each[0])[1]


def _least_squares(errors, x):
    """The minimum of a sum of squares by Levenberg and Marquardt."""
    damping, now = 1e-2, errors(x)
    for _ in range(_NUM_ROUNDS):
        if damping > _MOST_DAMPING:
            break  # no step is better
        slopes = np.stack(
            [(errors(x + 1e-6 * unit) - now) / 1e-6 for unit in np.eye(x.size)],
            axis=1,
        )
        curvature = slopes.T @ slopes
        step = np.linalg.solve(
            curvature + damping * np.eye(x.size), -slopes.T @ now
        )
        new = errors(x + np.clip(step, -2.0, 2.0))
        if np.sum(new**2) < np.sum(now**2):
            x, now, damping = x + np.clip(step, -2.0, 2.0), new, damping / 4
        else:
            damping *= 4
    return x, float(np.sum(now**2))
