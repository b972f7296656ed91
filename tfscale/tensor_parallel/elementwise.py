"""Whether an activation works on a shard of a tensor as on the whole.

The answer is in the operations that it makes, not in its name: it is traced on
a small tensor, whole and as a rank would have it.
"""

import concurrent.futures
import re
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfscale.tensor_parallel import retrace
from tfscale.tensor_parallel.propagation import propagation
from tfscale.tensor_parallel.propagation.layer_calls import LayerCall
from tfscale.tensor_parallel.propagation.layer_calls import Sink
from tfscale.tensor_parallel.propagation.layer_calls import Source
from tfscale.tensor_parallel.propagation.layer_calls import Trace

# Layers that have no variables: others could make some in a trace.
_LAYERS = (keras.layers.ELU, keras.layers.LeakyReLU, keras.layers.ReLU)
# Classes of layers and operations of Keras that act on each element by itself,
# beside the ones that a trace finds: of several inputs, or random.
_CLASSES = re.compile(
    "activation|add|multiply|square|identity|(alpha|gaussian)?dropout"
    "|gaussiannoise|(leaky)?relu6?|[cs]?elu|gelu|(hard)?(silu|sigmoid|tanh)"
    "|mish|softplus|softsign",
    re.IGNORECASE,
)
# A batch of unknown size, lest shapes be made into constants.
_SIZES = (None, 4, 6)

_found = weakref.WeakKeyDictionary()


def acts_on_elements(activation: Callable | None) -> bool:
    """Whether a shard of the result comes from the same shard of the input.

    Along each dim but the batch. An activation (None is the identity) that has
    variables, or fails on some tensors, counts as one that needs the whole.
    """
    if activation is None or activation is keras.activations.linear:
        return True
    is_layer = isinstance(activation, keras.Layer)
    if is_layer and type(activation) not in _LAYERS:
        return False
    try:
        if activation not in _found:
            _found[activation] = _is_elementwise(activation)
        return _found[activation]
    except TypeError:  # There are no weak references to it.
        return _is_elementwise(activation)


def treats_elements_apart(operation) -> bool:
    """As `acts_on_elements`, of a layer or an operation in a model.

    It may take several inputs, and draw random numbers.
    """
    if _CLASSES.fullmatch(type(operation).__name__):
        return acts_on_elements(getattr(operation, "activation", None))
    is_layer = isinstance(operation, keras.Layer)
    return not is_layer and acts_on_elements(operation)


def _is_elementwise(activation):
    # A thread of its own has none of what surrounds the call.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(_runs_on_parts, activation).result()


def _runs_on_parts(activation):
    try:
        whole = _trace(activation, _SIZES)
        return whole is not None and all(
            _runs_on_part(activation, whole, dim) for dim in (1, 2)
        )
    except Exception:
        # It is code of the user, and will fail where it counts.
        return False


def _trace(activation, sizes):
    graph = tf.Graph()
    with graph.as_default():
        inputs = tf.compat.v1.placeholder("float32", sizes)
        outputs = tf.identity(activation(inputs))
    is_alike = outputs.shape.as_list() == list(sizes)
    # Ranks would not draw what one device draws.
    draws = any(
        op.op_def.is_stateful or "Random" in op.type
        for op in graph.get_operations()
    )
    return (graph, inputs, outputs) if is_alike and not draws else None


def _runs_on_part(activation, whole, dim):
    sizes = list(_SIZES)
    sizes[dim] //= 2
    part = _trace(activation, sizes)
    if part is None:
        return False
    traces = [_as_trace(*each, dim) for each in (whole, part)]
    found = propagation.propagate(traces[0], num_ranks=2, retraced=True)
    return (
        "up" in found.sharded
        and "down" in found.sink_sharded
        and not retrace.differences(*traces, found, num_ranks=2)
    )


def _as_trace(graph, inputs, outputs, dim):
    """As if it lay between layers that leave and take the dim sharded."""
    end = len(Trace(graph, ()).operations)
    calls = [
        LayerCall("up", range(0, 1), sources=(Source(inputs, dim),)),
        LayerCall("down", range(end, end), sinks=(Sink(outputs, dim),)),
    ]
    return Trace(graph, calls)
