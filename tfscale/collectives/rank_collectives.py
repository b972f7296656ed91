"""Exchanges between the model ranks of a replica, forward and backward.

A replica whose layers are split over T devices runs as T traced threads, its
model ranks. These operations are collectives of the ranks; each rank computes
its result on its device:

    operator                  forward             backward
    copy_to_ranks      (f)    x                   sum over ranks
    reduce_from_ranks  (g)    sum over ranks      x
    total_over_ranks          sum over ranks      sum over ranks
    scatter_to_ranks          own shard           all shards
    gather_from_ranks         all shards          own shard
    reduce_scatter            own shard of sum    all shards
    all_gather                all shards          own shard of sum

f and g are those of Shoeybi et al., Megatron-LM (2019), section 3; the last
two are g-bar and its conjugate in Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models (2022), section 4.2.2. The whole side
of an operator is the same tensor on all ranks, value and gradient.

The backward of each is another one, its transpose, which has a gradient too: a
loss may contain gradients (a gradient penalty).

With one rank, and outside of a replica, all return their argument.
"""

import contextlib
import weakref

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import operations
from tfscale.context import step_context
from tfscale.graphs import vectorized_map
from tfscale.graphs.with_gradient import with_gradient

# TensorFlow's error in a thread that has left the graph of the step.
_IN_BRANCH = "while defining a new graph"

# The results of `gather_from_ranks` in a graph, by name. Tensors would
# keep the graph alive.
_gathered = weakref.WeakKeyDictionary()


def num_ranks() -> int:
    """The number of devices over which this replica's layers are split."""
    if tf.distribute.in_cross_replica_context():
        return 1
    extended = tf.distribute.get_strategy().extended
    return getattr(extended, "num_model_ranks", 1)


def rank() -> int:
    """The model rank of this thread within its replica."""
    if num_ranks() == 1:
        return 0
    index = symbols.get_current_replica_id_as_int()
    return index % num_ranks()


def local_shards():
    """Within it, a sharded variable is this rank's shard and not the whole."""
    return step_context.within_ranks(reads_shards=True)


def reads_shards() -> bool:
    """Whether this thread is inside `local_shards`."""
    return step_context.current().ranks.reads_shards


def as_used(value):
    """The value of a trainable variable, as this thread uses it."""
    if step_context.current().ranks.gradients_are_partial and num_ranks() > 1:
        return copy_to_ranks(value)
    return value


def graph_of_collectives():
    """A context in the graph of collectives: outside of loops and branches."""
    graph = step_context.current().ranks.graph
    if graph is None or tf.executing_eagerly():
        return contextlib.nullcontext()
    return graph.as_default()


def copy_to_ranks(x):
    """The same tensor, whose gradient is the sum over the ranks (f)."""
    return _with_gradient(tf.identity, reduce_from_ranks, x)


def reduce_from_ranks(x):
    """The sum over the ranks, whose gradient each rank uses unchanged (g)."""
    return _with_gradient(sum_over_ranks, copy_to_ranks, x)


def total_over_ranks(x):
    """The sum over the ranks, which each rank uses for itself."""
    return _with_gradient(sum_over_ranks, total_over_ranks, x)


def scatter_to_ranks(x, dim: int):
    """This rank's shard of a tensor that is the same on all ranks."""
    return _with_gradient(local_shard, gather_from_ranks, x, dim)


def gather_from_ranks(x, dim: int):
    """All ranks' shards of a tensor, which all ranks use alike."""
    shape = x.shape

    def shard_of(gradient, dim):
        # `keras.remat` gives the gradient of the variable, which is the shard.
        if shape.is_fully_defined() and gradient.shape == shape:
            return gradient
        return scatter_to_ranks(gradient, dim)

    whole = _with_gradient(concat_over_ranks, shard_of, x, dim)
    if num_ranks() > 1 and not tf.executing_eagerly():
        shards = _gathered.setdefault(whole.graph, {})
        shards[whole.name] = x.name, dim
    return whole


def reduce_scatter(x, dim: int):
    """This rank's shard of the sum over the ranks."""
    return _with_gradient(local_shard_of_sum, all_gather, x, dim)


def all_gather(x, dim: int):
    """All ranks' shards of a tensor, which each rank uses for itself."""
    return _with_gradient(concat_over_ranks, reduce_scatter, x, dim)


def _with_gradient(forward, backward, x, *dim):
    """`forward(x)`, whose gradient is `backward` of the output's."""
    if num_ranks() == 1:
        return x

    x = tf.convert_to_tensor(x)
    with symbols.record.stop_recording():
        result = forward(x, *dim)

    def gradient(gradients, _):
        # The gradient of a lookup is sparse rows.
        return [backward(tf.convert_to_tensor(gradients[0]), *dim)]

    (result,) = with_gradient(gradient, [result], [x])
    return result


def shard_before_gather(whole):
    """The shard from which `gather_from_ranks` made a tensor, and the dim.

    It has the dtype of the tensor, which may have been converted since; `None`
    for any other tensor. TensorFlow prunes the gather unless the whole is used
    too.
    """
    if tf.executing_eagerly():
        return None
    dtypes, shards = [], _gathered.get(whole.graph, {})
    while whole.name not in shards:
        if whole.op.type not in ("Cast", "Identity"):
            return None
        dtypes.append(whole.dtype)
        (whole,) = whole.op.inputs
    name, dim = shards[whole.name]
    shard = whole.graph.get_tensor_by_name(name)
    for dtype in reversed(dtypes):
        shard = tf.cast(shard, dtype)
    return shard, dim


def local_shard(x, dim: int):
    """This rank's shard along a dim; no gradient is defined."""
    if num_ranks() == 1:
        return x
    return tf.split(x, num_ranks(), axis=dim)[rank()]


def sum_over_ranks(x):
    """The sum of the ranks' tensors; no gradient is defined."""
    return _exchange(operations.all_reduce, x)


def max_over_ranks(x):
    """The elementwise maximum of the ranks' tensors; no gradient."""
    return _exchange(_max_on_each, x)


def concat_over_ranks(x, dim: int):
    """The ranks' tensors one after the other; no gradient is defined."""
    return _exchange(lambda shards: operations.all_gather(shards, dim), x)


def local_shard_of_sum(x, dim: int):
    """This rank's shard of the sum of the ranks' tensors; no gradient."""
    return _exchange(lambda shards: operations.reduce_scatter(shards, dim), x)


def _max_on_each(tensors):
    results = []
    for tensor in tensors:
        with tf.device(tensor.device):
            results.append(tf.reduce_max(tf.stack(tensors), axis=0))
    return results


def _exchange(collective, x):
    """Calls a collective for the tensors of all ranks of each replica."""
    count = num_ranks()
    if count == 1:
        return x

    def merge(strategy, values):
        del strategy
        values = values.values
        groups = [
            range(first, first + count)
            for first in range(0, len(values), count)
        ]
        return symbols.distribute_utils.regroup(
            operations.in_groups(collective, values, groups)
        )

    # The identity is on the device of this rank, wherever `x` comes from.
    x, context = tf.identity(x), tf.distribute.get_replica_context()
    vectorized_map.refuse_exchange([x])
    try:
        result = context.merge_call(merge, args=(x,))
    except RuntimeError as error:
        if _IN_BRANCH not in str(error):
            raise
        raise RuntimeError(
            "Model ranks cannot exchange tensors inside a branch, a loop or a "
            "`tf.function` of a step. Received: a call of a sharded layer in "
            "`tf.cond`, `tf.while_loop` or the like. Keep its variables whole "
            "(keys with `None`s in the layout map), or call the layer "
            "outside: Python loops are unrolled."
        ) from error
    # No gradient is defined. Without this, the custom gradient around it would
    # look for variables in the whole model.
    return tf.stop_gradient(result)
