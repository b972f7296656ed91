"""Finds what a schedule repeats, so that it can run in a loop.

Once a pipeline is full, its actions repeat in the same order, for later
microbatches. 1F1B on two devices with 9 microbatches:

    before   F0.0 F0.1 F1.0
    loop     B1.0 B0.0 F1.1 F0.2   7 times, each 1 microbatch later
    after    B1.7 B0.7 F1.8 B1.8 B0.8

So the graph of a step need not grow with the number of microbatches. A tensor
that one iteration makes and another one reads goes through registers, which
shift after each iteration:

    F0.2 ─► [2] ─► [1] ─► [0] ─► B0.0

Nothing is guessed: a loop has exactly the actions of the schedule, and at the
start of each iteration exactly the same tensors are in flight.
"""

import collections
import itertools
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
from typing import Any
from typing import NamedTuple

from tfscale.schedules.action import Action

# Six iterations of one microbatch, those of 8 in 2 stages, took 4 % longer in a
# loop, and the first step no less time (benchmarks/pipeline/README.md).
MIN_REPEATS = 6
MIN_MICROBATCHES = 7


class Repeated(NamedTuple):
    """Actions that are done several times, each `period` microbatches later.

    >>> twice = Repeated((Action("F", 0, 0), Action("F", 1, 0)), 2, 1)
    >>> [str(action) for action in twice.unrolled()]
    ['F0.0', 'F1.0', 'F0.1', 'F1.1']
    """

    actions: tuple[Action, ...]
    repeats: int = 1
    period: int = 0

    def unrolled(self) -> Iterator[Action]:
        """All actions, in order."""
        for time in range(self.repeats):
            for action in self.actions:
                yield _moved(action, time * self.period)


def find_repeats(
    actions: Sequence[Action], min_repeats: int = MIN_REPEATS
) -> list[Repeated]:
    """The same actions in the same order, as few of them written out as can be.

    >>> actions = [Action(kind, 0, m) for m in range(8) for kind in "FB"]
    >>> [(body, *_)] = find_repeats(actions)
    >>> [str(action) for action in body]
    ['F0.0', 'B0.0']
    """
    actions = list(actions)
    best = max(_candidates(actions, min_repeats), default=None)
    if best is None:
        return [Repeated(tuple(actions))] if actions else []
    _, start, found = best
    end = start + len(found.actions) * found.repeats
    return [
        *find_repeats(actions[:start], min_repeats),
        found,
        *find_repeats(actions[end:], min_repeats),
    ]


def _candidates(actions, min_repeats):
    """Yields how many actions a repetition saves, its start, and itself."""
    positions = {action: position for position, action in enumerate(actions)}
    microbatches = {action.microbatch for action in actions}
    for period in range(1, len(microbatches) // min_repeats + 1):
        # How far behind each action the same one of a later microbatch is.
        distances = [
            positions.get(_moved(action, period), -1) - position
            for position, action in enumerate(actions)
        ]
        for length, count in collections.Counter(distances).items():
            if length < 1 or count < length * (min_repeats - 1):
                continue
            start = 0
            for same, group in itertools.groupby(distances, length.__eq__):
                size = len(list(group))
                repeats = size // length + 1
                is_long = repeats * period >= MIN_MICROBATCHES
                if same and is_long and repeats >= min_repeats:
                    body = tuple(actions[start : start + length])
                    found = Repeated(body, repeats, period)
                    yield length * (repeats - 1), start, found
                start += size


class Loop(NamedTuple):
    """A repetition, and the tensors that go in and out of its iterations.

    Tensors are named by keys of the caller, microbatches by their number in the
    first iteration.

    Args:
        body: The repetition.
        registers: Microbatch and key of each tensor that is in flight at the
            start of an iteration.
        consumed: Keys of tensors that are made before the loop; each iteration
            reads some of them.
        made: Keys of tensors that iterations make, and that are read after
            the loop.
    """

    body: Repeated
    registers: tuple[tuple[int, Any], ...]
    consumed: tuple[Any, ...]
    made: tuple[Any, ...]


# Kind and stage of the actions that make, or read, a tensor.
Users = Mapping[Any, Set[tuple[str, int]]]


def find_loops(
    actions: Sequence[Action],
    makers: Users,
    readers: Users,
    results: Set[Hashable] = frozenset(),
) -> list[Repeated | Loop]:
    """Divides a schedule into loops, and actions that are done once.

    Args:
        actions: In an order in which each comes after all it depends on.
        makers: For each key of a tensor that belongs to a microbatch the
            actions that make it; none for what is there from the beginning.
        readers: The same for those that read it.
        results: Keys that are wanted after the last action.
    """
    repeated = find_repeats(actions)
    positions = {action: position for position, action in enumerate(actions)}
    found: list[Repeated | Loop] = []
    start = 0
    for body in repeated:
        loop = None
        if body.repeats > 1:
            loop = _loop(positions, start, body, makers, readers, results)
        if loop is not None:
            found.append(loop)
        else:
            found.append(Repeated(tuple(body.unrolled())))
        start += len(body.actions) * body.repeats
    return found


def _loop(positions, start, body, makers, readers, results):
    """None if iterations differ."""
    inside = {(action.kind, action.stage) for action in body.actions}
    keys_of = collections.defaultdict(list)
    for key in {**makers, **readers}:
        use = frozenset(makers.get(key, ())), frozenset(readers.get(key, ()))
        keys_of[use].append(key)
    registers, consumed, made = [], [], []
    for (making, reading), keys in keys_of.items():
        if len(making) > 1:  # each adds to what the one before made
            reading |= making
        if making & inside and reading & inside:
            moved = _in_flight(positions, start, body, making, reading)
            if moved is None:
                return None
            registers += itertools.product(moved, keys)
        elif reading & inside:
            consumed += keys
        elif making & inside and reading:
            made += keys
        if making & inside:
            made += [key for key in keys if key in results and key not in made]
    return Loop(body, tuple(registers), tuple(consumed), tuple(made))


def _in_flight(positions, start, body, making, reading):
    """Microbatches, numbered as in the first iteration; None if they differ."""
    length = len(body.actions)
    found = [set() for _ in range(body.repeats + 1)]
    for microbatch in {action.microbatch for action in positions}:

        def positions_of(users, microbatch=microbatch):
            return [
                positions[Action(*user, microbatch)] - start for user in users
            ]

        begin, end = min(positions_of(making)), max(positions_of(reading))
        for time in range(
            max(0, begin // length + 1), min(body.repeats, end // length) + 1
        ):
            found[time].add(microbatch - time * body.period)
    return sorted(found[0]) if found.count(found[0]) == len(found) else None


def _moved(action, microbatches):
    return action._replace(microbatch=action.microbatch + microbatches)
