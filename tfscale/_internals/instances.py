"""What an object of Keras holds, and the same object with something else.

Not by the names of attributes but by all that there are: Keras keeps them where
Python does, which is relied on and has contracts.
"""

from collections.abc import Iterator
from typing import Any
from typing import TypeVar

T = TypeVar("T")


def attributes_of(instance: Any) -> dict[str, Any]:
    """All that an object has of its own, by name: ours and a user's too."""
    return dict(vars(instance))


def held_by(instance: Any) -> Iterator[Any]:
    """The values of its attributes, and what is in those that are containers.

    Those of a dict, list or tuple one by one; not what is further in.
    """
    for value in vars(instance).values():
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def altered(instance: T, **changed: Any) -> T:
    """A copy of an object, of the same class, with some other attributes."""
    copy = object.__new__(type(instance))
    copy.__dict__.update({**vars(instance), **changed})
    return copy


def view(instance: T, **members: Any) -> T:
    """The same object, state and all, but for some members of its class.

    The object itself must not change, not even for as long as it is called:
    model ranks call it at the same time, one going on where another one waits.
    """
    kind: Any = type(instance)
    view = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(view, "__dict__", vars(instance))
    return view
