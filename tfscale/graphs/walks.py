"""Walks through a graph: what can be reached, and what is called."""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Hashable
from collections.abc import Iterable
from typing import Any
from typing import TypeVar

import tensorflow as tf

_Node = TypeVar("_Node", bound=Hashable)


def reachable(
    start: Iterable[_Node], neighbors: Callable[[_Node], Iterable[_Node]]
) -> dict[_Node, None]:
    """The nodes that can be reached from some nodes, and these, in order."""
    found = dict.fromkeys(start)
    stack = list(found)
    while stack:
        for node in neighbors(stack.pop()):
            if node not in found:
                found[node] = None
                stack.append(node)
    return found


def called_functions(
    nodes: Iterable[Any], library: Container[str]
) -> list[str]:
    """The functions of a library that are attributes of nodes of a graph."""
    values = [value for node in nodes for value in node.attr.values()]
    functions = [x for v in values for x in (v.func, *v.list.func)]
    return [f.name for f in functions if f.name in library]


def ancestors(
    operations: Iterable[tf.Operation],
    stop: Container[tf.Operation] = (),
    control_inputs: bool = False,
) -> dict[tf.Operation, None]:
    """Operations and their dependencies, without `stop` and those before it."""

    def inputs(op):
        before = [tensor.op for tensor in op.inputs]
        if control_inputs:
            before += op.control_inputs
        return [each for each in before if each not in stop]

    return reachable((op for op in operations if op not in stop), inputs)
