"""Puts a subclass in the place of an object's class.

The methods in which an optimizer or a layer of Keras differs on a mesh are a
mixin with ordinary `super()` calls. The object then has a class that begins
with the mixin, like `FSDPModule` in PyTorch's FSDP2:

    type(x)       made here: named like Dense, bases MeshLayer and Dense
    x.__class__   Dense, by which Keras writes configs and makes copies

So `isinstance` is true of both, and saved files do not depend on a mesh.
"""

import functools
from typing import Any

# The real class of an object, whatever `__class__` says.
_CLASS = object.__dict__["__class__"]


class Mixin:
    def __reduce_ex__(self, protocol):
        """See `object`: copies and pickles are plain objects."""
        kind, plain = type(self), self.__class__
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if getattr(function, "__self__", None) is kind:
            # As in Keras, a method of the class makes the copy.
            function = getattr(plain, function.__name__)
        arguments = tuple(plain if x is kind else x for x in arguments)
        return function, arguments, *rest


def put(instance: Any, mixin: type, **attributes: Any) -> None:
    """Gives an object the methods of a mixin, before those of its own class.

    To put it again, or a base of a mixin that is there, changes nothing.
    `attributes` are set on the object, for the methods.

    >>> class Polite:
    ...     def greet(self):
    ...         return f"{super().greet()}, {self.name}"
    >>> class Guest:
    ...     def greet(self):
    ...         return "hello"
    >>> guest = Guest()
    >>> put(guest, Polite, name="Ada")
    >>> guest.greet(), isinstance(guest, Polite), guest.__class__ is Guest
    ('hello, Ada', True, True)
    """
    for name, value in attributes.items():
        setattr(instance, name, value)
    kind = type(instance)
    if not issubclass(kind, mixin):
        subclass: Any = _subclass
        _CLASS.__set__(instance, subclass(mixin, kind))


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
