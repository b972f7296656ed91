"""The state of an object of Keras, and altered views of it.

All attributes are read, not certain names: Keras keeps them where Python does,
which has contracts.
"""

import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

import keras

_MAX_ITEMS = 10_000
_PLAIN = (bool, int, float, str, bytes, type(None))
# Packages whose objects are not searched.
_PACKAGES = (
    *("builtins", "keras", "keras_hub", "numpy", "tensorflow", "tfscale"),
    *("collections", "threading", "weakref", "functools", "_thread"),
)

T = TypeVar("T")


def attributes_of(instance: Any) -> dict[str, Any]:
    return dict(vars(instance))


def held_by(instance: Any) -> Iterator[Any]:
    """The values of its attributes, and the contents of containers.

    Dicts, lists and tuples are opened once, not recursively.
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
    """The wanted objects that an object leads to, with their paths.

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
    """A view of an object with the same state and some other members.

    The object itself must not change, even during a call: model ranks call it
    at the same time, in turns.
    """
    kind: Any = type(instance)
    view = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(view, "__dict__", vars(instance))
    return view
