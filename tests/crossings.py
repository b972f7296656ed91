"""Which cases of a crossing of features run always: the first, and by a hash.

The first row of a table is the one that its author would keep: the plainest,
or the one whose result other tests use. Of the others a hash chooses, by the
arguments and not by the place in the table. As many run as there are to be,
and not about as many: tables of three rows of which one runs had two by chance.
"""

import re
import zlib
from collections.abc import Sequence


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
