"""Which cases of a crossing of features run always: chosen by a hash.

A case is known by its arguments and not by its place in the table, so that a
row that is added changes nothing of the others.
"""

import re
import zlib
from collections.abc import Sequence


def always(cases: Sequence[str], every: int) -> set[int]:
    """Indices of the cases of a test that run always: one of `every`.

    Args:
        cases: What each case is called, with its arguments.
        every: One of how many cases is chosen, on average; at least one is.
    """
    # Addresses of functions differ between runs.
    keys = [re.sub(r" at 0x[0-9a-f]+", "", case) for case in cases]
    # Of equal names, which functions without one have, by their order.
    numbers = [
        zlib.crc32(f"{key} {keys[:index].count(key)}".encode())
        for index, key in enumerate(keys)
    ]
    chosen = {i for i, number in enumerate(numbers) if number % every == 0}
    return chosen or {numbers.index(min(numbers))}
