"""Pairs of Dense layers, of which one takes all that the other makes."""

import collections

import keras

from tfscale import _internals
from tfscale.tensor_parallel.elementwise import treats_elements_apart
from tfscale.tensor_parallel.layouts.projections import projection_of


class Chains:
    """Which Dense layers of a functional model take what from which ones.

    Args:
        graph: The functional model, see `functional_of`.
    """

    def __init__(self, graph):
        nodes = _internals.nodes_of(graph)
        self._maker = {id(x): n for n in nodes for x in n.outputs}
        self._users = collections.defaultdict(list)
        for node in nodes:
            for x in node.input_tensors:
                self._users[id(x)].append(node)
        # A result of the model is used by whoever calls the model.
        for x in graph.outputs:
            self._users[id(x)].append(None)
        calls = collections.Counter(id(n.operation) for n in nodes)
        self._matrices = {
            id(n): p
            for n in nodes
            if calls[id(n.operation)] == 1
            and (p := projection_of(n.operation)) is not None
            and p.is_matrix
        }
        self._nodes = nodes

    def pairs(self):
        """Yields `(ups, down)`: all that `down` takes comes from `ups`."""
        for node in self._nodes:
            if id(node) in self._matrices:
                path = [node]
                ups = self._sources(node.input_tensors, path)
                down = self._matrices[id(node)]
                fits = ups and {up.sizes[1] for up in ups} == {down.sizes[0]}
                if fits and self._is_private(path):
                    yield ups, down

    def _sources(self, tensors, path):
        """The Dense layers before `tensors`, or None if there are others."""
        found = []
        for x in tensors:
            node = self._maker.get(id(x))
            if node is None:
                return None
            if node in path:
                continue
            path.append(node)
            if id(node) in self._matrices:
                sources = [self._matrices[id(node)]]
                if not sources[0].is_elementwise:
                    return None
            elif treats_elements_apart(node.operation):
                sources = self._sources(node.input_tensors, path)
            else:
                return None
            if sources is None:
                return None
            found += sources
        return found

    def _is_private(self, path):
        """Whether nobody else uses what is on the way to `path[0]`."""
        return all(
            user in path
            for node in path[1:]
            for x in node.outputs
            for user in self._users[id(x)]
        )


def functional_of(layer):
    """The functional model that a call of `layer` runs, or None."""
    kind = layer.__class__
    if isinstance(layer, keras.Sequential):
        own_call = kind.call is not keras.Sequential.call
        return None if own_call else _internals.functional_in(layer)
    is_functional = isinstance(layer, _internals.Functional)
    if is_functional and kind.call is _internals.Functional.call:
        return layer
    return None
