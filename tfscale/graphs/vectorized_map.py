"""Exchanges of devices within `tf.vectorized_map` and `tape.jacobian`.

TensorFlow traces one iteration, in which the loop variable is a placeholder.
Then it repeats the operations that depend on it, for all iterations at once. It
does not follow a tensor to another device's part of an exchange: that would
stay as it was traced.

Source: Agarwal, Static Automatic Batching in TensorFlow (2019).
"""

from collections.abc import Iterable

import tensorflow as tf

from tfscale.graphs import walks

# The scope of TensorFlow's in which an iteration is traced.
SCOPE = "loop_body"


def is_of_iteration(tensor: tf.Tensor | tf.IndexedSlices) -> bool:
    """Whether a tensor depends on the loop variable."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or SCOPE not in graph.get_name_scope():
        return False
    return any(
        op.type == "PlaceholderWithDefault" and SCOPE in op.name
        for op in walks.ancestors([tensor.op])
    )


def refuse_exchange(tensors: Iterable[tf.Tensor]) -> None:
    """Refuses tensors of an iteration, which devices are to exchange."""
    if any(map(is_of_iteration, tensors)):
        raise RuntimeError(
            "Devices cannot exchange tensors inside one iteration of "
            "`tf.vectorized_map` or `tape.jacobian`. Received: a call, or a "
            "gradient, of a layer that model ranks or replicas divide, or a "
            "sum over replicas. Keep its variables whole, or call it outside: "
            "Python loops are unrolled."
        )
