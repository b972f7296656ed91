"""XLA for functions that run on several devices: by clusters.

`tf.function(jit_compile=True)` compiles a whole function for one device. A
function of several devices is compiled in clusters: TensorFlow's passes find
the operations that XLA can compile, on each device, and leave out what it
cannot: sums over devices, strings, lookups, Python functions.

    GPU:0   lookup ─ [ cluster ] ─ AddN ─ [ cluster: update ]
    GPU:1   lookup ─ [ cluster ] ─ AddN ─ [ cluster: update ]

A cluster starts when all its inputs are there. Exchanges between devices lie in
no cluster, and TensorFlow launches a NCCL operation on all devices of a process
at once, when it has arrived on all; operations between workers are ordered by
control edges. So no device waits for another in an order of its own, even where
clusters differ: those of device 0 also make the logs. On CPUs TensorFlow makes
clusters only with `TF_XLA_FLAGS=--tf_xla_cpu_global_jit` in the environment.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import random_operations


@contextlib.contextmanager
def with_exceptions() -> Iterator[None]:
    """Keeps some operations, made within it, outside; for the default graph.

    XLA draws other random numbers from the same seed: dropout would have other
    masks than in a step that is not compiled.
    """
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    yield
    for op in graph.get_operations()[first:]:
        if _stays_outside(op):
            attributes.keep_outside_of_clusters(op)


def _stays_outside(op):
    if op.type == "Slice":
        # TensorFlow computes its size within the cluster, but on CPU:0, even
        # for another CPU device; one cluster cannot have two.
        return "GPU" not in op.device.upper()
    return (
        # It hides a number, which TensorFlow would fold within a cluster, and
        # place on CPU:0.
        op.type == "PlaceholderWithDefault"
        # Devices wait for each other in them.
        or op.type.startswith(("Collective", "Nccl"))
        or random_operations.draws_from_seed(op.type)
        or random_operations.draws_from_state(op.type)
    )
