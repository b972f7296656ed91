"""The time of each layer, by the scopes in the names of operations."""

import collections
import re
from collections.abc import Collection
from collections.abc import Iterable

from tfscale.profiling.breakdown import Event

_GRADIENTS = ("gradient_tape", "gradients")
_NUMBERED = re.compile(r"(.+)_\d+$")


def is_backward(name: str) -> bool:
    """Whether an operation is of a backward.

    >>> is_backward("gradient_tape/model/dense/MatMul/MatMul_1")
    True
    """
    return any(scope in _GRADIENTS for scope in name.split("/"))


def layer_times(
    events: Iterable[Event], layers: Collection[str]
) -> dict[str, tuple[float, float]]:
    """Picoseconds of forward and backward of each layer, dearest first.

    An operation counts for the innermost layer in its name. Times of all
    devices add up.

    Args:
        events: What the devices do.
        layers: Names of layers.

    >>> events = [
    ...     Event("a", 0, 3, "model/dense/MatMul"),
    ...     Event("a", 3, 9, "gradient_tape/model/dense/MatMul/MatMul_1"),
    ... ]
    >>> layer_times(events, ["dense"])
    {'dense': (3, 6)}
    """
    events = [event for event in events if event.axis is None]
    layer_of = _layers_of_scopes({e.name for e in events}, set(layers))
    times: dict = collections.defaultdict(lambda: [0, 0])
    for event in events:
        for path in reversed(_paths(event.name)):
            if path in layer_of:
                backward = is_backward(event.name)
                times[layer_of[path]][backward] += event.end - event.begin
                break
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {name: (forward, backward) for name, (forward, backward) in ordered}


def _paths(name):
    """The scopes of an operation, from the outermost to the innermost."""
    scopes = name.split("/")[:-1]
    scopes = [
        scope
        for scope in scopes
        if scope not in _GRADIENTS and "PartitionedCall" not in scope
    ]
    return [tuple(scopes[: i + 1]) for i in range(len(scopes))]


def _layers_of_scopes(names, layers):
    """The layer of each scope that has one.

    TensorFlow numbers a scope that is there already: of layers `dense` and
    `dense_1` the second trace has `dense_1` and `dense_1_1`. So within a scope
    each layer gets another one, as a matching of the most layers.
    """
    scopes = collections.defaultdict(set)
    for name in names:
        for path in _paths(name):
            if _candidates(path[-1], layers):
                scopes[path[:-1]].add(path[-1])
    found = {}
    for outer, inner in scopes.items():
        matched: dict[str, str] = {}  # layer -> scope
        for scope in sorted(inner, key=len):
            _match(scope, layers, matched, set())
        layer_of = {scope: layer for layer, scope in matched.items()}
        for scope in inner:
            other = _candidates(scope, layers)[0]
            found[*outer, scope] = layer_of.get(scope, other)
    return found


def _candidates(scope, layers):
    numbered = _NUMBERED.match(scope)
    names = [scope, *([numbered[1]] if numbered else ())]
    return [name for name in names if name in layers]


def _match(scope, layers, matched, tried):
    for layer in _candidates(scope, layers):
        if layer not in tried:
            tried.add(layer)
            other = matched.get(layer)
            if other is None or _match(other, layers, matched, tried):
                matched[layer] = scope
                return True
    return False
