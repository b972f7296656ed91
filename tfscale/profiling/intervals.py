"""Sets of times, as sorted intervals that do not overlap."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in any of the intervals.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times in both of two sets.

    >>> intersection([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times of `a` that are not in `b`.

    >>> difference([(0, 3), (4, 6)], [(2, 5)])
    [(0, 2), (5, 6)]
    """
    edge = float("inf")
    ends = [-edge, *(time for interval in b for time in interval), edge]
    return intersection(a, list(zip(ends[::2], ends[1::2])))


def length(intervals: Iterable[Interval]) -> float:
    """The duration of a set.

    >>> length([(0, 3), (4, 6)])
    5
    """
    return sum(end - begin for begin, end in intervals)
