"""The backward of a step gathers weights again, so that none is kept for it.

A tape gives the backward the tensors of the forward: a gathered weight would
live until its gradient is computed. When all gradients are there, operations of
the backward that read a gathered weight get one that is gathered a second time,
in the graph that Keras is tracing:

    shard ─┬─► gate ─► whole ─► forward
           └─► gate ─► whole ─► backward          the second gate waits until
                                                  other weights were used

It takes the shard that the forward read, so it is right also where weights are
assigned between the two. What lies between a weight and its use, a cast to
half precision mostly, is made again too.

The graph has no cycle: a new gather waits only for operations that are older
than each of its uses.

Source: the recomputation of all-gathers in Zhang et al., SimpleFSDP: Simpler
Fully Sharded Data Parallel with torch.compile (2024), section 3.
"""

import dataclasses

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.distribute.fully_sharded import weight_gather
from tfscale.distribute.fully_sharded.weight_gather import Gather
from tfscale.distribute.fully_sharded.window import Window


@dataclasses.dataclass(eq=False)
class _Event:
    """A weight is needed, in the forward or in the backward.

    Attributes:
        position: Of the first operation that needs it, in the graph.
        gather: Its first gather.
        uses: `(operation, inputs)` that compute with it; see
            `weight_gather.uses`.
        is_backward: Whether they are of the backward.
    """

    position: int
    gather: Gather
    uses: list
    is_backward: bool


def gather_again() -> None:
    """Has the backward of this replica's step gather its weights again.

    In replica context, when gradients are there; all replicas do the same.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    step = weight_gather.gathers_of_step(graph)
    if not step.gathers:
        return
    order = {op.name: i for i, op in enumerate(graph.get_operations())}
    events = _events(step.gathers, graph, order)
    window, latest = Window(step.limit), {}
    for event in events:
        gather = event.gather
        is_kept = event.is_backward and gather in window
        left = window.add(gather, gather.num_bytes)
        if event.is_backward and not is_kept:
            waits = [
                op
                for other in left
                for op in _ends(latest[other], graph)
                if order.get(op.name, event.position) < event.position
            ]
            shard = graph.get_tensor_by_name(gather.shard)
            with tf.device(shard.device):
                _, whole = weight_gather.gather_after(waits, shard, gather.dim)
            _replace(event.uses, whole)
        latest[gather] = event
    # Of what has no backward yet, there may be one behind another `apply`.
    again = {event.gather for event in events if event.is_backward}
    step.gathers[:] = [g for g in step.gathers if g not in again]


def _events(gathers, graph, order):
    """All needs of weights, in the order of the graph."""
    events = []
    for gather in gathers:
        uses = weight_gather.uses(graph.get_tensor_by_name(gather.whole))
        later = [use for use in uses if _is_backward(use[0])]
        earlier = [use for use in uses if not _is_backward(use[0])]
        events.append(_Event(order[gather.gate], gather, earlier, False))
        if later:
            first = min(order[op.name] for op, _ in later)
            events.append(_Event(first, gather, later, True))
    return sorted(events, key=lambda event: event.position)


def _is_backward(op):
    return weight_gather.BACKWARD in op.name


def _ends(event, graph):
    """The operations behind which the memory of a weight is free again."""
    ends = [op for op, _ in event.uses]
    gradient = event.gather.gradient
    if event.is_backward and gradient is not None:
        ends.append(graph.get_tensor_by_name(gradient).op)
    return ends


def _replace(uses, whole):
    """Has operations compute with another gathered tensor."""
    made = {(): whole}

    def view(views):
        if views not in made:
            op, source = views[-1], view(views[:-1])
            inputs = [x if x.op.type == "Const" else source for x in op.inputs]
            with tf.device(op.device):
                made[views] = op.graph.create_op(
                    op.type,
                    inputs,
                    [output.dtype for output in op.outputs],
                    attrs=dict(op.node_def.attr),
                    op_def=op.op_def,
                ).outputs[0]
        return made[views]

    for op, inputs in uses:
        for index, views in inputs:
            attributes.replace_input(op, index, view(views))
