"""Attributes by which TensorFlow marks the operations of its graphs.

Each is listed in the tables beside, with why.
"""

# The gradient that a `tf.custom_gradient` has registered for an operation.
GRADIENT_TYPE = "_gradient_op_type"
# The shapes of an operation's outputs, where a graph was asked for them.
OUTPUT_SHAPES = "_output_shapes"
# The operations that one has to be on the same device with.
COLOCATED_WITH = "_class"
# A loop or branch that its executor runs as a part of the graph around it.
LOWERED = "_lower_using_switch_merge"
