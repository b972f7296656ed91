"""Updates that the first replica or rank traces, and all make.

All make the same update, on components or shards of their own. Adam alone is
forty operations for each variable, half of the graph of a step. So it is traced
once, Grappler optimizes it once, and its operations are added to the step for
each of them.
"""

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.graphs import grappler
from tfscale.graphs import walks
from tfscale.graphs.subgraph import Subgraph
from tfscale.graphs.subgraph import extract
from tfscale.variables.of_variable import value_of


class SharedUpdates:
    """The updates of one step, for replicas that make them one by one."""

    def __init__(self):
        self._traced: list[_Traced | None] = []
        self._counts = collections.Counter()

    def run(
        self,
        update: Callable[..., None],
        args: tuple,
        variables: Sequence[Any],
    ) -> None:
        """Calls `update(*args)`, or adds what a replica traced of it.

        All replicas have the same updates in the same order. `variables` are
        all that it reads or assigns to; if it uses other tensors, it is called.
        """
        if tf.executing_eagerly():
            update(*args)
            return
        thread = symbols.get_current_replica_id_as_int()
        number = self._counts[thread]
        self._counts[thread] += 1
        components = [_component(variable, thread) for variable in variables]
        if number == len(self._traced):
            self._traced.append(_trace(update, args, components))
        traced = self._traced[number]
        if traced is None or traced.specs != _specs(args):
            update(*args)
        else:
            traced.run(args, components)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The operations of an update.

    Attributes:
        subgraph: Takes the tensors of gradients.
        specs: Of these tensors.
        components: The variables of the replica that traced it.
        handles: By name of a placeholder, the number of a component.
    """

    subgraph: Subgraph
    specs: list[tf.TensorSpec]
    components: Sequence[tf.Variable]
    handles: dict[str, int]

    def run(self, args, components) -> None:
        """Adds the operations, on a replica's components, to its graph."""
        capture = tf.compat.v1.get_default_graph().capture
        # They wait for what the step says. All that is assigned depends on
        # them; TensorFlow can make no operations of a graph wait.
        given = map(tf.identity, _tensors(args))
        tensors = dict(zip(self.subgraph.feeds, given))
        for name, number in self.handles.items():
            tensors[name] = capture(components[number].handle)
        pairs = zip(self.components, components)
        devices = {one.device: other.device for one, other in pairs}
        with tf.control_dependencies(None):
            self.subgraph.run(tensors, devices)


def _trace(update, args, components):
    """The update, or None if it is not one of gradients and variables."""
    feeds = []

    def call(*tensors):
        feeds.clear()
        # An optimizer of a pipeline works where its gradients are.
        for tensor, given in zip(tensors, _tensors(args)):
            with tf.device(None), tf.device(given.device):
                feeds.append(tf.identity(tensor))
        update(*tf.nest.pack_sequence_as(args, feeds, expand_composites=True))

    specs = _specs(args)
    function = tf.function(call, autograph=False).get_concrete_function(*specs)
    graph = function.graph
    numbers = {id(x.handle): i for i, x in enumerate(components)}
    used = {x.op.name: numbers.get(id(of)) for of, x in graph.captures}
    writes = [op for op in graph.control_outputs if op.type != "ReadVariableOp"]
    if None in used.values() or not _depend(writes, feeds):
        return None
    inputs = {x.op for x in (*graph.inputs, *feeds)}
    subgraph = extract(
        [op for op in graph.get_operations() if op not in inputs],
        feeds,
        [],
        writes,
        graph.as_graph_def(),
    )
    if subgraph.calls_functions:
        return None  # They go with the graph that was traced.
    _read_once(subgraph)
    subgraph = grappler.optimize(subgraph)
    handles = {name: used[of] for name, of in subgraph.captures.items()}
    return _Traced(subgraph, specs, components, handles)


def _read_once(subgraph):
    """Has all that read a variable which is not assigned to share one read.

    Each update of a variable reads the number of steps. Grappler does not know
    that two reads are equal, and would compute the same corrections again.
    """
    nodes = subgraph.graph_def.node
    users = collections.defaultdict(list)
    for node in nodes:
        for name in subgraph.captures.keys() & set(node.input):
            users[name].append(node)
    same = {}
    for reads in users.values():
        if all(node.op == "ReadVariableOp" for node in reads):
            del reads[0].input[1:]
            same.update((node.name, reads[0].name) for node in reads[1:])
    for node in nodes:
        for i, source in enumerate(node.input):
            name = source.removeprefix("^")
            node.input[i] = source.replace(name, same.get(name, name))
    kept = [node for node in nodes if node.name not in same]
    del nodes[:]
    nodes.extend(kept)


def _depend(operations, tensors):
    """Whether each operation depends on one of the tensors."""
    found = {tensor.op for tensor in tensors}
    return all(
        not found.isdisjoint(walks.ancestors([operation], control_inputs=True))
        for operation in operations
    )


def _component(variable, thread):
    found = value_of(variable)
    if isinstance(found, tf.distribute.DistributedValues):
        return found.values[thread]
    return found


def _tensors(args):
    return tf.nest.flatten(args, expand_composites=True)


def _specs(args):
    return [tf.TensorSpec(x.shape, x.dtype) for x in _tensors(args)]
