"""Which rows a crossing of features has, and which of them run always.

A crossing of more than two tables has a row for each two of their values, and
not for each three. Of its rows the first one runs always, and others by a hash.

The first row of a table is the one that its author would keep: the plainest,
or the one whose result other tests use. Of the others a hash chooses, by the
arguments and not by the place in the table. As many run as there are to be,
and not about as many: tables of three rows of which one runs had two by chance.
"""

import itertools
import random
import re
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any


def pairs(
    can_be: Callable[[dict[str, Any]], bool] = lambda row: True,
    **tables: Iterable[Any],
) -> list[dict[str, Any]]:
    """Few rows in which each two values of two tables meet.

    The first row has the first value of each table. The next one is, of some
    that are made by chance, always the one with most new pairs. Source: Cohen
    et al., The AETG System (1997), section 4.

    Args:
        can_be: Whether there may be a row with these values, of some tables.
        **tables: Values by the name of an argument.

    Returns:
        Rows for `parameterized.parameters`.
    """
    values = {name: list(table) for name, table in tables.items()}
    choices = random.Random(0)

    def valued(places):
        # In the order of the tables.
        return {n: values[n][places[n]] for n in values if n in places}

    def is_allowed(places):
        return can_be(valued(places))

    missing = {
        pair
        for names in itertools.combinations(sorted(values), 2)
        for pair in itertools.product(*(_places(values, n) for n in names))
        if is_allowed(dict(pair))
    }
    row, rows = dict.fromkeys(values, 0), []
    while missing:
        missing -= _pairs_of(row)
        rows.append(valued(row))
        if missing:
            ordered = sorted(missing)
            found = [
                _candidate(ordered, missing, values, is_allowed, choices)
                for _ in range(40)
            ]
            row = max(found, key=lambda row: len(_pairs_of(row) & missing))
    return rows


def _places(values, name):
    return [(name, place) for place in range(len(values[name]))]


def _pairs_of(row):
    return set(itertools.combinations(sorted(row.items()), 2))


def _candidate(ordered, missing, values, is_allowed, choices):
    row = dict(choices.choice(ordered))
    rest = [name for name in values if name not in row]
    choices.shuffle(rest)
    for name in rest:
        rows = [{**row, name: place} for _, place in _places(values, name)]
        rows = [row for row in rows if is_allowed(row)]
        choices.shuffle(rows)
        row = max(rows, key=lambda row: len(_pairs_of(row) & missing))
    return row


def always(cases: Sequence[str], every: int) -> set[int]:
    """Indices of the cases of a test that run always: one of `every`.

    Args:
        cases: What each case is called, with its arguments.
        every: One of how many cases is chosen, rounded up.
    """
    # Addresses of functions differ between runs.
    keys = [re.sub(r" at 0x[0-9a-f]+", "", case) for case in cases]
    # Of equal names, which functions without one have, by their order.
    numbers = [
        zlib.crc32(f"{key} {keys[:index].count(key)}".encode())
        for index, key in enumerate(keys)
    ]
    # The smallest ones: a row that is added takes the place of one at most.
    others = sorted(range(1, len(cases)), key=numbers.__getitem__)
    return {0, *others[: -(-len(cases) // every) - 1]}
