"""Functions that each forked child calls at once, such as to close files.

The kernel ends a lock, and tells the other side of a connection, once all
copies of an open file are closed: a child that lives longer would keep both.
Python cannot undo such a hook. There is one, from the first of these files on.
"""

import functools
import os
from collections.abc import Callable


def in_children(work: Callable[[], None]) -> None:
    """Has all children that are forked later call a function, once each.

    Args:
        work: A function without arguments, which may run again in a child of a
            child. Of equal functions one runs.
    """
    _work()[work] = None


@functools.cache
def _work() -> dict[Callable[[], None], None]:
    work: dict[Callable[[], None], None] = {}

    def run():
        for each in work:
            each()

    os.register_at_fork(after_in_child=run)
    return work
