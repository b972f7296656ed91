"""Several sources at stated weights, in an order that can be entered anywhere.

The source at a position is a function of the position: a pattern repeats, in
which each source is as frequent as its weight says, as evenly as possible. So
the number of times that a source came before a position is a sum, which needs
no counting, and is the position in that source's own order.

    weights 0.5, 0.25, 0.25    a b a c | a b a c | a ...
    record of a's own order    0   1     2   3     4

Each source is shuffled by its own epoch: all of its records come once before
any comes again.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfscale.data.sources.source import IndexedSource

_PATTERN = 1000  # positions: weights are exact to a thousandth
_ROUNDS = 4  # as `tf.random.experimental.index_shuffle` has
EXHAUSTION = ("repeat", "stop", "renormalize")


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Positions in which the same sources take part."""

    begin: int  # the first position
    pattern: np.ndarray  # a source for each position; it repeats
    drawn: np.ndarray  # counts of the sources before the stretch

    def counts(self, length):
        """How often each source comes in the first `length` positions."""
        rounds, rest = divmod(length, len(self.pattern))
        whole, begun = (
            np.bincount(pattern, minlength=len(self.drawn))
            for pattern in (self.pattern, self.pattern[:rest])
        )
        return rounds * whole + begun

    def position_of(self, number, source):
        """The n-th position of a source in the stretch, counted from 0."""
        positions = np.flatnonzero(self.pattern == source)
        rounds, rest = divmod(int(number), len(positions))
        return rounds * len(self.pattern) + int(positions[rest])


def mix(
    sources: Mapping[str, tuple[IndexedSource, float]],
    *,
    exhausted: str = "repeat",
) -> IndexedSource:
    """Records of several sources, as often as their weights say.

    Args:
        sources: Dict from a name to `(source, weight)`. The sources must be
            read at random (`arrays`, `tokens`, `text`, `pack`, `files`,
            `image_folder`), and have records of one structure. Weights are
            above 0, and relative to each other.
        exhausted: When an epoch ends, and how a source goes on after all of its
            records: `"repeat"`, it begins its next epoch, and the mixture's
            epoch ends when all sources have been seen whole; `"stop"`, the
            mixture's epoch ends, and the other records come in the next one; or
            `"renormalize"`, the other sources go on at their weights, so that
            each record comes once.

    Returns:
        A source of their records; its `class_names` are the sources' names.

    Raises:
        TypeError: If a source cannot be read at random, or `sources` is no
            dict.
        ValueError: If there is none, one is empty, a weight is not above 0 or
            too small, or records differ in structure or dtype.

    Example:

    >>> import numpy as np
    >>> from tfscale import data
    >>> source = data.mix(
    ...     {
    ...         "code": (data.arrays(np.arange(6)), 0.75),
    ...         "text": (data.arrays(np.arange(100, 104)), 0.25),
    ...     },
    ...     exhausted="stop",
    ... )
    >>> source.num_records
    8
    """
    if exhausted not in EXHAUSTION:
        raise ValueError(
            f"`exhausted` must be one of {EXHAUSTION}. Received: "
            f"exhausted={exhausted!r}."
        )
    members, weights, one_shape = _checked(sources)
    sizes = np.array([member.num_records for member in members], np.int64)
    stretches, length = _stretches(sizes, weights, exhausted)
    offsets = np.cumsum(sizes) - sizes
    gathers = one_shape and all(
        member.gather and member.decode is None for member in members
    )
    return IndexedSource(
        kind="mix",
        num_records=length,
        read=_reader(members, offsets),
        gather=_gatherer(members, offsets) if gathers else None,
        in_memory=all(member.in_memory for member in members),
        class_names=tuple(sources),
        order=_order(stretches, length, sizes, offsets),
        num_skipped=sum(member.num_skipped for member in members),
    )


def _checked(sources):
    if not isinstance(sources, Mapping):
        raise TypeError(
            "A mixture is a dict from names to `(source, weight)`. Received: "
            f"a {type(sources).__name__}."
        )
    if not sources:
        raise ValueError("A mixture must have a source. Received: none.")
    for name, pair in sources.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                "A mixture is a dict from names to `(source, weight)`. "
                f"Received: {name!r} with a {type(pair).__name__}."
            )
        source, weight = pair
        if not isinstance(source, IndexedSource) or source.order is not None:
            raise TypeError(
                "A mixture needs sources with random access: arrays, tokens, "
                f"text, pack, files, image_folder. Received: {name!r}, a "
                f"{getattr(source, 'kind', type(source).__name__)}."
            )
        if not source.num_records:
            raise ValueError(
                "A source of a mixture must have a record. Received: "
                f"{name!r}, of {source.kind}, without one."
            )
        if not isinstance(weight, numbers.Real) or not 0 < weight < math.inf:
            raise ValueError(
                "Weights must be numbers above 0. Received: "
                f"{weight!r} for {name!r}."
            )
    members = [source for source, _ in sources.values()]
    weights = np.array([weight for _, weight in sources.values()], float)
    weights /= weights.max()  # their sum must be finite
    names = list(sources)
    firsts = [_record(member, tf.constant(0, tf.int64)) for member in members]
    specs = [_spec(first) for first in firsts]
    for name, spec in zip(names, specs, strict=True):
        if spec != specs[0]:
            raise ValueError(
                "All records of a mixture must have the same structure. "
                f"Received: {names[0]!r} with {specs[0]} and {name!r} with "
                f"{spec}."
            )
    shapes = {str(_shapes(first)) for first in firsts}
    return members, weights / weights.sum(), len(shapes) == 1


def _shapes(record):
    return [tf.shape(t).numpy() for t in keras.tree.flatten(record)]


def _spec(record):
    return keras.tree.map_structure(
        lambda t: (tf.convert_to_tensor(t).dtype.name, t.shape.rank),
        record,
    )


def _record(source, index):
    record = source.read(index)
    if source.decode is None:
        return record
    if isinstance(record, tuple):
        return source.decode(*record)
    return source.decode(record)


def _pattern(weights):
    """A source for each position; the next is always the one that lags most."""
    counts = np.maximum(np.round(weights * _PATTERN), 0).astype(np.int64)
    if (counts[weights > 0] == 0).any():
        raise ValueError(
            f"A weight must be at least a {_PATTERN}th of all. Received: "
            f"{weights[weights > 0].tolist()}."
        )
    counts //= math.gcd(*counts.tolist())
    share = counts / counts.sum()
    came = np.zeros(len(counts), np.int64)
    pattern = np.zeros(counts.sum(), np.int64)
    for index in range(len(pattern)):
        lag = np.where(came < counts, share * (index + 1) - came, -np.inf)
        pattern[index] = np.argmax(lag)
        came[pattern[index]] += 1
    return pattern


def _stretches(sizes, weights, exhausted):
    """The stretches of an epoch, and its length."""
    left, stretches, begin = sizes.copy(), [], 0
    while left.any():
        active = np.where(left > 0, weights, 0.0)
        if exhausted == "renormalize":
            active /= active.sum()
        stretch = _Stretch(begin, _pattern(active), sizes - left)
        stretches.append(stretch)
        ends = [
            stretch.position_of(left[source] - 1, source) + 1
            for source in np.flatnonzero(left)
        ]
        if exhausted != "renormalize":
            return stretches, {"repeat": max, "stop": min}[exhausted](ends)
        left = left - stretch.counts(min(ends))
        begin += min(ends)
    return stretches, begin


def _order(stretches, length, sizes, offsets):
    """A function from positions of an epoch to records of the mixture."""
    begins = tf.constant([s.begin for s in stretches], tf.int64)
    periods = tf.constant([len(s.pattern) for s in stretches], tf.int64)
    firsts = tf.cumsum(periods, exclusive=True)
    # For each position of each pattern: the source, how often it came before,
    # and how often it comes in the pattern.
    sources = tf.constant(np.concatenate([s.pattern for s in stretches]))
    before = tf.constant(
        [
            s.drawn[source] + np.count_nonzero(s.pattern[:at] == source)
            for s in stretches
            for at, source in enumerate(s.pattern)
        ],
        tf.int64,
    )
    per_round = tf.constant(
        np.concatenate([s.counts(len(s.pattern))[s.pattern] for s in stretches])
    )
    last = stretches[-1]
    per_epoch = tf.constant(last.drawn + last.counts(length - last.begin))
    all_sizes, all_offsets = tf.constant(sizes), tf.constant(offsets)

    def order(positions, seed, epoch, shuffle):
        stretch = tf.searchsorted(begins, positions, side="right") - 1
        within = positions - tf.gather(begins, stretch)
        period = tf.gather(periods, stretch)
        at = tf.gather(firsts, stretch) + within % period
        which = tf.gather(sources, at)
        number = (
            epoch * tf.gather(per_epoch, which)
            + tf.gather(before, at)
            + within // period * tf.gather(per_round, at)
        )
        size = tf.gather(all_sizes, which)
        local = number % size
        if shuffle:
            # Each source and each of its epochs has a key.
            seeds = tf.fill(tf.shape(which), seed)
            key = tf.stack([seeds, which, number // size], axis=1)
            # The public `index_shuffle` pads keys of a matrix wrongly (2.21).
            local = tf.raw_ops.RandomIndexShuffle(
                index=local, seed=key, max_index=size - 1, rounds=_ROUNDS
            )
        return tf.gather(all_offsets, which) + local

    return order


def _reader(members, offsets):
    def read(index):
        which = tf.searchsorted(
            tf.constant(offsets), tf.reshape(index, [1]), side="right"
        )[0]
        branches = [
            lambda member=member, offset=offset: _record(member, index - offset)
            for member, offset in zip(members, offsets, strict=True)
        ]
        return tf.switch_case(which - 1, branches)

    return read


def _gatherer(members, offsets):
    def gather(index):
        which = tf.searchsorted(tf.constant(offsets), index, side="right") - 1
        rows = tf.dynamic_partition(
            tf.range(tf.size(index)), which, len(members)
        )
        found = [
            member.gather(tf.gather(index, local) - offset)
            for member, offset, local in zip(
                members, offsets, rows, strict=True
            )
        ]
        return keras.tree.map_structure(
            lambda *batches: tf.dynamic_stitch(rows, batches), *found
        )

    return gather
