"""Calls a function as one node of the graph around it.

TensorFlow inlines what is called in the usual way, once per call: best for
speed, since parts of two functions run side by side, but many calls make a
large graph, which takes long to get ready. An attribute can forbid it, but an
error within such a call cancels the calls around it before they learn of the
error, and all that comes out is that something was cancelled.

A branch of a `Case` is left alone too, and shares the rendezvous of the graph
around it, through which an error goes to whatever waits for data before
anything is cancelled. So errors keep the names of their operations; provided
that Grappler leaves the graph alone, as it does in a step (grappler.py): it
would turn a `Case` whose branch is known into a call.
"""

import tensorflow as tf


def call_as_one_node(
    function: tf.types.experimental.ConcreteFunction,
    *arguments: tf.Tensor,
) -> list[tf.Tensor]:
    """Calls a function that takes and returns tensors, on one device."""
    stateful = function.function_def.signature.is_stateful
    case = tf.raw_ops.Case if stateful else tf.raw_ops.StatelessCase
    outputs = function.outputs
    return case(
        branch_index=tf.constant(0),
        input=[*arguments, *function.captured_inputs],
        Tout=[output.dtype for output in outputs],
        branches=[function],
        output_shapes=[output.shape for output in outputs],
    )
