"""A `tf.function` that a call traces and does not run."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tfscale._internals import in_place


class _Traced(BaseException):
    """Ends the call after the trace."""


class TracedFunction(in_place.Mixin):
    """Members that are put before the class of a `tf.function`."""

    # Whether a call does not run it.
    is_only_traced = False

    def __call__(self, *args, **kwargs):
        """Runs the function, or only traces it and raises."""
        if not self.is_only_traced:
            return super().__call__(*args, **kwargs)
        self.get_concrete_function(*args, **kwargs)
        raise _Traced


@contextlib.contextmanager
def only_traced(function: Any) -> Iterator[None]:
    """Within it the first call traces a function, and ends the block."""
    in_place.put(function, TracedFunction, is_only_traced=True)
    try:
        with contextlib.suppress(_Traced):
            yield
    finally:
        function.is_only_traced = False
