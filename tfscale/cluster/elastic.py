"""How the launcher and a program agree on another number of workers.

launcher ── environment: fewest, most, present, planned ──► each worker
         ◄── exit code: 192 + the number to start again with ──
"""

import os
from typing import NamedTuple

VARIABLE = "TFSCALE_ELASTIC_WORKERS"
# Shells use 1 to 2 and 126 to 165, `sysexits.h` 64 to 78; 255 is the last.
_FIRST_CODE = 192
MOST = 255 - _FIRST_CODE


class ElasticGroup(NamedTuple):
    """The workers of a launcher whose number may change."""

    fewest: int
    most: int
    present: int
    planned: int  # more than `present` if some were lost since it was asked for

    def to_environ(self) -> dict[str, str]:
        """The variable of the environment that `elastic_group` reads."""
        return {VARIABLE: ",".join(map(str, self))}

    def count_of(self, code: int) -> int | None:
        """The number of workers that an exit code asks for, or None."""
        count = code - _FIRST_CODE
        is_other = count != self.present and self.fewest <= count <= self.most
        return count if is_other else None


def elastic_group() -> ElasticGroup | None:
    """The workers of the launcher that started this process, if elastic.

    Example:

    >>> elastic_group() is None
    True
    """
    text = os.environ.get(VARIABLE)
    return ElasticGroup(*map(int, text.split(","))) if text else None


def exit_code(count: int) -> int:
    """The exit code that asks for so many workers, at most `MOST`."""
    return _FIRST_CODE + count
