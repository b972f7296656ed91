"""Takes tensors out of the `IdentityN` in which others pass with them.

An update of a weight waits for all reads of it. Grappler drops such an edge
where a path says the same, and the path may lead through the `IdentityN` of a
`tf.custom_gradient`, in which the gradients of all its variables pass:

    read ─► gradient of another weight ─┐
                                        ├─ IdentityN ─► gradient ─► update
             gradient of the weight ────┘

Then it splits the `IdentityN`: neither edge nor path is left, and an update may
come before a read. `keras.remat` is such a gradient, whose backward reads all
its weights again. TensorFlow 2.21 does so on one device too.
"""

import tensorflow as tf

from tfscale._internals import attributes


def split_identities(graph: tf.Graph) -> None:
    """Lets operations read what passes, where they read an `IdentityN`.

    It is called when a step has its updates.
    """
    for op in graph.get_operations():
        if op.type != "IdentityN":
            continue
        for passed, source in zip(op.outputs, op.inputs):
            for consumer in set(passed.consumers()):
                for index, tensor in enumerate(consumer.inputs):
                    if tensor is passed:
                        attributes.replace_input(consumer, index, source)
