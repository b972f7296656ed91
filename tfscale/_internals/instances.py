"""What an object of Keras holds, and the same object with something else.

Not by the names of attributes but by all that there are: Keras keeps them where
Python does, which is relied on and has contracts.
"""

import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

import keras

_MAX_ITEMS = 10_000
_PLAIN = (bool, int, float, str, bytes, type(None))
# Whose objects hold what is theirs.
_PACKAGES = (
    *("builtins", "keras", "keras_hub", "numpy", "tensorflow", "tfscale"),
    *("collections", "threading", "weakref", "functools", "_thread"),
)

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


def reachable(
    instance: Any, is_wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """What is wanted of all that an object holds, with the way to it.

    Through attributes, containers, layers, losses and metrics, and objects of
    other classes than those of Keras, TensorFlow and the like. Not through
    sets, which have no order, and containers of more than 10,000.
    """
    seen: set[int] = set()
    found = [("", instance)]
    while found:
        path, value = found.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if path and is_wanted(value):
            yield path, value
            continue
        if isinstance(value, dict | list | tuple):
            if len(value) > _MAX_ITEMS:
                continue
            pairs = value.items() if isinstance(value, dict) else ()
            within = list(pairs or enumerate(value))
        elif value is instance or _is_entered(value):
            within = list(vars(value).items())
        else:
            continue
        for name, value in reversed(within):
            if not isinstance(value, _PLAIN):
                found.append((f"{path}/{name}" if path else str(name), value))


def _is_entered(value):
    if isinstance(value, type | types.FunctionType | types.ModuleType):
        return False
    if not hasattr(value, "__dict__"):
        return False
    kinds = (keras.Layer, keras.Loss, keras.Metric)
    package = type(value).__module__.partition(".")[0]
    return isinstance(value, kinds) or package not in _PACKAGES


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
