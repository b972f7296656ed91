"""A `tf.function` that a call traces and does not run."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tfscale._internals import in_place


class _Traced(BaseException):
    """Ends the call after the trace."""


class OnlyTraced(in_place.Mixin):
    """Members that are put before the class of a `tf.function`."""

    def __call__(self, *args, **kwargs):
        """Traces the function, and raises."""
        self.get_concrete_function(*args, **kwargs)
        raise _Traced


@contextlib.contextmanager
def only_traced(function: Any) -> Iterator[None]:
    """Within it the first call traces a function, and ends the block."""
    with in_place.putting(function, OnlyTraced), contextlib.suppress(_Traced):
        yield
