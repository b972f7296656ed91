"""Puts a subclass in the place of an object's class, and takes it out again.

What an optimizer or a layer that Keras made has to do otherwise on a mesh is
written down as a mixin with ordinary `super()` calls. The object is then of a
class that begins with it, as a module is of `FSDPModule` in PyTorch's FSDP2:

    type(x)       made here: named like Dense, bases ShardedLayer and Dense
    x.__class__   Dense, by which Keras writes configs and makes copies

So `isinstance` is true of both, and what is saved knows nothing of a mesh.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

# The class that an object is of, whatever it says of itself.
_CLASS = object.__dict__["__class__"]


class Mixin:
    """The base of what is put in the place of a class."""

    def __reduce__(self):
        """See `object`; objects of Keras are copied and pickled as plain ones.

        Keras gives a method of the class, which is to be the plain one too.
        """
        function, arguments = super().__reduce__()
        return getattr(self.__class__, function.__name__), arguments


def put(instance: Any, mixin: type) -> None:
    """Gives an object the methods of a mixin, before those of its own class.

    A second time, or of a mixin that is a base of one that is there, changes
    nothing.

    Args:
        instance: The object.
        mixin: A class without a constructor.

    Example:

    >>> class Polite:
    ...     def greet(self):
    ...         return "please, " + super().greet()
    >>> class Guest:
    ...     def greet(self):
    ...         return "hello"
    >>> guest = Guest()
    >>> put(guest, Polite)
    >>> guest.greet(), isinstance(guest, Polite), guest.__class__ is Guest
    ('please, hello', True, True)
    """
    kind = type(instance)
    if not issubclass(kind, mixin):
        _CLASS.__set__(instance, _subclass(mixin, kind))


@contextlib.contextmanager
def putting(instance: Any, mixin: type) -> Iterator[None]:
    """Within it an object has the methods of a mixin; see `put`.

    Example:

    >>> class Guest:
    ...     def greet(self):
    ...         return "hello"
    >>> class Polite:
    ...     def greet(self):
    ...         return "please, " + super().greet()
    >>> guest = Guest()
    >>> with putting(guest, Polite):
    ...     guest.greet()
    'please, hello'
    >>> guest.greet()
    'hello'
    """
    kind = type(instance)
    put(instance, mixin)
    try:
        yield
    finally:
        _CLASS.__set__(instance, kind)


def take_out(instance: Any) -> None:
    """Makes an object plain again.

    Example:

    >>> class Guest: pass
    >>> guest = Guest()
    >>> put(guest, type("Polite", (), {}))
    >>> take_out(guest)
    >>> type(guest) is Guest
    True
    """
    _CLASS.__set__(instance, instance.__class__)


@functools.cache
def _subclass(mixin, kind):
    plain = getattr(kind, "plain_class", kind)
    return type(kind)(
        plain.__name__,
        (mixin, kind),
        {
            "__class__": property(lambda self: plain),
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "plain_class": plain,
        },
    )
