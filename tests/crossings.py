"""Which rows a crossing of features has, and which of them run always.

A crossing of more than two tables has a row for each two of their values, and
not for each three. Of its rows the first one runs always, and others by a hash.

The first row of a table is the one that its author would keep: the plainest,
or the one whose result other tests use. Of the others a hash chooses, by the
arguments and not by the place in the table. As many run as there are to be,
and not about as many: tables of three rows of which one runs had two by chance.
"""

import itertools
import re
import zlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any


def pairs(**tables: Iterable[Any]) -> list[dict[str, Any]]:
    """Few rows in which each two values of two tables meet.

    The first row has the first value of each table. The next one is always the
    first of those with most new pairs. For more rows than one can look at see
    `accumulation/pairs_test.py`.

    Args:
        **tables: Values by the name of an argument.

    Returns:
        Rows for `parameterized.parameters`.
    """
    values = [list(table) for table in tables.values()]
    rows = [
        (row, set(itertools.combinations(enumerate(row), 2)))
        for row in itertools.product(*(range(len(table)) for table in values))
    ]
    apart = set().union(*(met for _, met in rows))
    found = []
    while apart:
        row, met = max(rows, key=lambda row: len(row[1] & apart))
        apart -= met
        found.append(row)
    return [
        {
            name: table[index]
            for name, table, index in zip(tables, values, row, strict=True)
        }
        for row in found
    ]


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
