"""The functions that TensorFlow runs, as Grappler and placement leave them."""

import collections
import contextlib

from tfscale._internals import symbols

UPDATES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@contextlib.contextmanager
def executed_functions():
    """Yields a list that gets what TensorFlow instantiates to run it.

    Each entry is a function as it runs: one graph per device.
    """
    found = []
    context = symbols.eager_context.context()
    context.enable_run_metadata()
    # TensorFlow goes on to collect once it has begun: what other tests ran.
    context.export_run_metadata()
    try:
        yield found
        found += [
            graphs.partition_graphs
            for graphs in context.export_run_metadata().function_graphs
        ]
    finally:
        context.disable_run_metadata()


def largest(found):
    """The function of most operations: a training step."""
    return max(found, key=lambda graphs: sum(len(g.node) for g in graphs))


def in_one_order(function, prefix):
    """Types of operations, in the order in which TensorFlow has to run them.

    Raises:
        AssertionError: If two of those whose type begins with `prefix` may run
            in either order.
    """
    nodes, before = _nodes(function)
    exchanges = {n.name: n for n in nodes.values() if n.op.startswith(prefix)}
    earlier = {
        n: len(before(exchanges[n]) & exchanges.keys()) for n in exchanges
    }
    order = sorted(exchanges, key=earlier.__getitem__)
    if [earlier[name] for name in order] != list(range(len(order))):
        raise AssertionError(f"These have no order: {earlier}")
    return [exchanges[name].op for name in order]


def reads_without_order(function):
    """Reads of a variable that may run before its update or after it.

    Returns:
        The number of updates, and pairs of an update and such a read.
    """
    nodes, before = _nodes(function)

    def handle(node):
        while node.input:
            node = nodes[node.input[0].split(":")[0]]
        return node.name

    reads = collections.defaultdict(list)
    for node in nodes.values():
        if node.op == "ReadVariableOp":
            reads[handle(node)].append(node.name)
    updates = [n for n in nodes.values() if n.op in UPDATES]
    return len(updates), [
        (update.name, read)
        for update in updates
        for read in set(reads[handle(update)]) - before(update)
        if update.name not in before(nodes[read])
    ]


def _nodes(function):
    """All operations by name, and a function: what has to run before one."""
    nodes = {node.name: node for graph in function for node in graph.node}
    sends = {
        node.attr["tensor_name"].s: node.name
        for node in nodes.values()
        if node.op == "_Send"
    }

    def inputs(node):
        found = [x.split(":")[0].removeprefix("^") for x in node.input]
        if node.op == "_Recv":
            found.append(sends[node.attr["tensor_name"].s])
        return found

    def before(node):
        seen, queue = set(), [node.name]
        while queue:
            for name in inputs(nodes[queue.pop()]):
                if name not in seen:
                    seen.add(name)
                    queue.append(name)
        return seen

    return nodes, before
