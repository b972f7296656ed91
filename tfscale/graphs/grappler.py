"""Grappler once per function, in place of once per use in every step.

TensorFlow optimizes the whole graph of a training step, in which a stage's
function stands once per microbatch: the time to the first step would grow with
their number and nothing would be gained. So the functions are optimized here,
each once, and the step that calls them runs without Grappler. Options of the
process do not change.
"""

import dataclasses
import functools

import tensorflow as tf

from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.graphs.subgraph import Subgraph


def optimize(subgraph: Subgraph) -> Subgraph:
    """Grappler's version of a future function."""
    keep = [*subgraph.fetches, *subgraph.keep]
    if not keep:
        return subgraph  # Grappler needs something to keep.
    meta_graph = tf.compat.v1.MetaGraphDef(graph_def=subgraph.graph_def)
    # Loops stay loops: a lowered loop cannot be traced into a function. It is
    # lowered when the function runs.
    for node in _control_flow(meta_graph.graph_def):
        node.attr.pop(attributes.LOWERED, None)
    # Grappler keeps what this collection names.
    meta_graph.collection_def["train_op"].node_list.value.extend(
        [*subgraph.feeds, *subgraph.captures, *keep]
    )
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    # It turns differentiated branches into operations that cannot be traced.
    options.disable_tfg_optimizer = True
    # By default graphs of less than four nodes are left alone.
    options.min_graph_nodes = -1
    if any(map(_is_bfloat16_convolution, meta_graph.graph_def.node)):
        # It fuses them with a bias into an operation that runs, but that no
        # graph can be given: it is not defined for bfloat16.
        options.remapping = options.OFF
    optimized = symbols.tf_optimizer.OptimizeGraph(
        config, meta_graph, verbose=False, cluster=_cluster()
    )
    for node in _control_flow(optimized):
        node.attr[attributes.LOWERED].b = True
    return dataclasses.replace(subgraph, graph_def=optimized)


def _is_bfloat16_convolution(node):
    return (
        node.op == "Conv2D"
        and node.attr["T"].type == tf.bfloat16.as_datatype_enum
    )


@functools.cache
def _cluster():
    # Without one Grappler makes its own for each call, with a session and
    # output. Only the kinds of devices matter, not their speed.

    def described(device):
        kind = device.device_type
        details = tf.config.experimental.get_device_details(device)
        environment = {}
        if version := details.get("compute_capability"):
            environment["architecture"] = ".".join(map(str, version))
        index = device.name.rpartition(":")[-1]
        return symbols.device_properties.NamedDevice(
            name=f"/job:localhost/replica:0/task:0/device:{kind}:{index}",
            properties={
                "type": kind,
                "environment": environment,
                "num_cores": 1,
                "frequency": 1000,
                "bandwidth": 1_000_000,
            },
        )

    return symbols.grappler_cluster.Cluster(
        devices=[
            described(device)
            for device in tf.config.list_physical_devices()
            if device.device_type in ("CPU", "GPU")
        ]
    )


def _control_flow(graph_def):
    bodies = [function.node_def for function in graph_def.library.function]
    for nodes in (graph_def.node, *bodies):
        for node in nodes:
            if node.op.removeprefix("Stateless") in ("Case", "If", "While"):
                yield node
