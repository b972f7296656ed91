"""Whether an activation works on shards as on the whole tensor.

The operations of its graph decide, not its name. A needless gather costs time,
and is never wrong.
"""

import re
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.graphs import walks
from tfscale.graphs.noting_scope import outside_scopes
from tfscale.tensor_parallel.propagation import custom_gradients
from tfscale.tensor_parallel.propagation.operation_rules import ELEMENTWISE

# Layers without variables: others could create some in a trace.
_LAYERS = (keras.layers.ELU, keras.layers.LeakyReLU, keras.layers.ReLU)
# Elementwise layers and operations of Keras that a trace does not find: of
# several inputs, or random.
_CLASSES = re.compile(
    "activation|add|multiply|square|identity|(alpha|gaussian)?dropout"
    "|gaussiannoise|(leaky)?relu6?|[cs]?elu|gelu|(hard)?(silu|sigmoid|tanh)"
    "|mish|softplus|softsign",
    re.IGNORECASE,
)
_found = weakref.WeakKeyDictionary()


def acts_on_elements(activation: Callable | None) -> bool:
    """Whether a shard of the result comes from the same shard of the input.

    Along each dim but the batch. An activation (None is the identity) that has
    variables, or fails on some tensors, counts as not elementwise.
    """
    if activation is None or activation is keras.activations.linear:
        return True
    is_layer = isinstance(activation, keras.Layer)
    if is_layer and type(activation) not in _LAYERS:
        return False
    try:
        if activation not in _found:
            _found[activation] = outside_scopes(_is_elementwise, activation)
        return _found[activation]
    except TypeError:  # It has no weak references.
        return outside_scopes(_is_elementwise, activation)


def treats_elements_apart(operation) -> bool:
    """As `acts_on_elements`, of a layer or an operation in a model.

    It may take several inputs, and draw random numbers.
    """
    if _CLASSES.fullmatch(type(operation).__name__):
        return acts_on_elements(getattr(operation, "activation", None))
    is_layer = isinstance(operation, keras.Layer)
    return not is_layer and acts_on_elements(operation)


def _is_elementwise(activation):
    """Whether an activation, and a gradient written by hand, is elementwise.

    All sizes are unknown, so that code that reads one fails.
    """
    try:
        graph = tf.Graph()
        with graph.as_default():
            inputs = tf.compat.v1.placeholder("float32", (None, None, None))
            outputs = tf.convert_to_tensor(activation(inputs))
        operations = graph.get_operations()
        for op in list(operations):
            if attributes.GRADIENT_TYPE in op.node_def.attr:
                results = custom_gradients.custom_gradient(op).results
                # Gradients of numbers, such as the beta of `silu`, are sums.
                operations += walks.ancestors(
                    [x.op for x in results if x is not None and x.shape.rank]
                )
    except Exception:
        # The user's code will fail in the step.
        return False
    return outputs.shape.rank == 3 and all(map(_works_on_shards, operations))


def _works_on_shards(op):
    if op.type == "Const":
        return op.outputs[0].shape.num_elements() == 1
    return op.type in ("Placeholder", "IdentityN", *ELEMENTWISE)
