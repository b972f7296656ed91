"""A custom gradient that does not keep its graph in memory.

`tf.custom_gradient` registers a function for each of its calls in a graph, as
long as the process lives. The function refers to tensors, they refer to the
graph, and the graph to the variables that it has captured: the weights and
slots of each model that was trained would stay in memory.
"""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols

_numbers = itertools.count()


def with_gradient(
    backward: Callable[[Sequence[Any], Sequence[tf.Tensor]], Sequence[Any]],
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """The results; their gradients by `inputs` are those of `backward`.

    It is called with the gradients of the results and with the inputs. Other
    tensors that led to the results have no gradient. `backward` is registered
    as long as the process lives: it must refer to no tensor.
    """
    with symbols.record.stop_recording():
        if tf.executing_eagerly():
            found = [tf.identity(result) for result in results]
        else:
            # Where no tape is asked: in a function that is called.
            name = _registered(backward, len(results))
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": name}):
                same = tf.identity_n([*results, *inputs])
            found = same[: len(results)]
    symbols.record.record_operation(
        "tfscale_gradient",
        found,
        list(inputs),
        lambda *gradients: backward(gradients, inputs),
    )
    return found


@functools.cache
def _registered(backward, num_results):
    name = f"tfscale_gradient_{next(_numbers)}"

    def gradient(op, *gradients):
        inputs = op.inputs[num_results:]
        found = backward(gradients[:num_results], inputs)
        return [*[None] * num_results, *found]

    tf.RegisterGradient(name)(gradient)
    return name
