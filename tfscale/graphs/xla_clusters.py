"""XLA for functions that run on several devices: by clusters.

`tf.function(jit_compile=True)` compiles a whole function for one device. A
function of several devices is compiled in clusters: TensorFlow's passes find
the operations that XLA can compile, on each device, and leave out what it
cannot: sums over devices, strings, lookups, Python functions.

    GPU:0   lookup ─ [ cluster ] ─ AddN ─ [ cluster: update ]
    GPU:1   lookup ─ [ cluster ] ─ AddN ─ [ cluster: update ]

Clusters are made by one deterministic pass from the graphs of the devices, so
replicas, whose graphs are equal, have equal clusters. On CPUs TensorFlow makes
clusters only with `TF_XLA_FLAGS=--tf_xla_cpu_global_jit` in the environment.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import function_options
from tfscale.graphs import random_operations

_ON = tf.compat.v1.OptimizerOptions.ON_1


def clusters() -> contextlib.AbstractContextManager[None]:
    """Within it, XLA compiles clusters of the functions of this thread."""
    return function_options.of_thread(_turn_on)


def _turn_on(config):
    config.graph_options.optimizer_options.global_jit_level = _ON


def are_on() -> bool:
    """Whether functions that this thread calls, or traces, have clusters."""
    options = function_options.current().graph_options.optimizer_options
    return options.global_jit_level == _ON


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Keeps operations that draw random numbers, made within it, outside.

    XLA makes other numbers from the same seed: dropout would have other masks
    than in a step that is not compiled. For the default graph.
    """
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    yield
    for op in graph.get_operations()[first:]:
        if random_operations.draws_from_seed(
            op.type
        ) or random_operations.draws_from_state(op.type):
            attributes.keep_outside_of_clusters(op)
