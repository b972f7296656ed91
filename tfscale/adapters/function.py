"""A `tf.function` that is traced when it is called, and not run."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tfscale import in_place


class _Traced(BaseException):
    """Ends a call that was only to be traced."""


class OnlyTraced(in_place.Mixin):
    """What is put in front of the class of a `tf.function`."""

    def __call__(self, *args, **kwargs):
        """Traces it, and raises."""
        self.get_concrete_function(*args, **kwargs)
        raise _Traced


@contextlib.contextmanager
def only_traced(function: Any) -> Iterator[None]:
    """Within it the first call traces a function, and ends the block."""
    with in_place.putting(function, OnlyTraced), contextlib.suppress(_Traced):
        yield
