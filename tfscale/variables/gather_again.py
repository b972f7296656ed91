"""Gathers weights again in the backward, so that none is kept from the forward.

A tape gives the backward the tensors of the forward: a gathered weight would
live until its gradient is computed. When all gradients are there, operations of
the backward that read a gathered weight get one that is gathered a second time,
in the graph that Keras is tracing:

    shard ─┬─► gate ─► whole ─► forward
           └─► gate ─► whole ─► backward          the second gate waits until
                                                  other weights were used

It takes the shard that the forward read, so it is right also where weights are
assigned between the two. Operations between a weight and its use, mostly a cast
to half precision, run again too.

The graph has no cycle: a new gather waits only for operations that are older
than each of its uses.

Source: the recomputation of all-gathers in Zhang et al., SimpleFSDP: Simpler
Fully Sharded Data Parallel with torch.compile (2024), section 3.
"""

from typing import NamedTuple

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.variables import gather_window
from tfscale.variables import weight_gather


class _Uses(NamedTuple):
    """All uses of a weight in the forward, or one in the backward.

    `position` is that of the gather, or of the operation, in the graph;
    `operations` are those of `weight_gather.uses`.
    """

    position: int
    need: gather_window.Need
    operations: list


def gather_again() -> None:
    """Lets the backward of this replica's step gather its weights again.

    In replica context, when gradients are there; all replicas do the same.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    step = weight_gather.gathers_of_step(graph)
    if not step.gathers:
        return
    order = {op.name: i for i, op in enumerate(graph.get_operations())}
    found = _uses(step.gathers, graph, order)
    plan = gather_window.plan([use.need for use in found], step.limit)
    gate, wholes = None, {}
    for use, waits in zip(found, plan):
        gather = use.need.gather
        if not use.need.is_backward:
            gate = graph.get_operation_by_name(gather.gate)
            continue
        if waits is not None:
            ends = [
                op
                for index in waits
                for op in _ends(found[index], graph)
                if order[op.name] < use.position
            ]
            shard = graph.get_tensor_by_name(gather.shard)
            with tf.device(shard.device):
                sent, whole = weight_gather.gather_after(
                    [gate, *ends], shard, gather.dim
                )
            gate, wholes[gather] = sent.op, {(): whole}
        if gather in wholes:
            _replace(use.operations, wholes[gather])
    # The backward may come later, before another `apply`.
    again = {use.need.gather for use in found if use.need.is_backward}
    step.gathers[:] = [g for g in step.gathers if g not in again]


def _uses(gathers, graph, order):
    found = []
    for gather in gathers:
        need = gather_window.Need(gather, gather.num_bytes, is_backward=False)
        forward = []
        for use in weight_gather.uses(graph.get_tensor_by_name(gather.whole)):
            if weight_gather.BACKWARD in use[0].name:
                again = need._replace(is_backward=True)
                found.append(_Uses(order[use[0].name], again, [use]))
            else:
                forward.append(use)
        found.append(_Uses(order[gather.gate], need, forward))
    return sorted(found, key=lambda use: use.position)


def _ends(use, graph):
    """The operations after which the memory of a weight is free."""
    ends = [op for op, _ in use.operations]
    gradient = use.need.gather.gradient
    if use.need.is_backward and gradient is not None:
        ends.append(graph.get_tensor_by_name(gradient).op)
    return ends


def _replace(uses, made):
    """Replaces a tensor in `uses` by `made[()]`, or by a view of that."""

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
