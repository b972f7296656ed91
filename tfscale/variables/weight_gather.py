"""Gathers a weight that replicas divide, where it is read.

    shard on each replica ─► gate ─► all-gather ─► whole weight ─► its uses
    shard of the gradient ◄────── reduce-scatter ◄──────── gradient

The gate is the operation that sends a shard: it waits until weights that were
gathered earlier have been used (`gather_window.py`). The gathers of a replica's
step are noted, by the names of tensors, for `gather_again.py`.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models (2020), section 5.3 (P_os+g+p).
"""

import dataclasses
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.graphs import vectorized_map
from tfscale.graphs.with_gradient import with_gradient
from tfscale.variables.gather_window import Window

# The gathers of each replica's step, by its graph and its thread.
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(eq=False)
class Gather:
    """A weight that one replica's step has gathered from shards along `dim`.

    Tensors are named, because they would keep their graph alive. `gate` is the
    operation that sends the shard, `num_bytes` the size of the whole, and
    `gradient` the one that was reduced and scattered, once there is one.
    """

    shard: str
    dim: int
    gate: str
    whole: str
    num_bytes: int
    gradient: str | None = None


class StepGathers:
    """The gathers of one replica in the graph of a step, in order.

    No more than `limit` bytes of gathered weights are alive at the same time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.gathers: list[Gather] = []
        self._window = Window(limit)

    def waits(self, graph, gather: Gather) -> list[tf.Operation]:
        """The operations that a new gather of the forward waits for."""
        waits = [graph.get_operation_by_name(g.gate) for g in self.gathers[-1:]]
        for other in self._window.add(gather, gather.num_bytes):
            whole = graph.get_tensor_by_name(other.whole)
            # `tf.vectorized_map` would repeat what waits for its iterations,
            # and with it lose the gradient of the gather.
            waits.extend(
                op
                for op, _ in uses(whole)
                if vectorized_map.SCOPE not in op.name
            )
        return waits


def gathers_of_step(graph, limit: int = 0) -> StepGathers:
    """The gathers of this thread in the graph of a step."""
    threads = _steps.setdefault(graph, {})
    thread = symbols.get_current_replica_id_as_int()
    if thread not in threads:
        threads[thread] = StepGathers(limit)
    return threads[thread]


def gathered(shard: tf.Tensor, dim: int, limit: int) -> tf.Tensor:
    """The whole weight; its gradient is this replica's shard of the sum.

    In replica context; all replicas call it with their shards, which divide it
    along `dim`. See `StepGathers` for `limit`.
    """
    if tf.executing_eagerly():
        _, whole = gather_after([], shard, dim)
        return _with_gradient(whole, shard, dim)
    step = gathers_of_step(shard.graph, limit)
    replicas = tf.distribute.get_strategy().extended.num_replicas
    num_bytes = shard.shape.num_elements() * shard.dtype.size * replicas
    gather = Gather(shard.name, dim, "", "", num_bytes)
    gate, whole = gather_after(step.waits(shard.graph, gather), shard, dim)

    def note(gradient):
        gather.gradient = gradient.name

    whole = _with_gradient(whole, shard, dim, note)
    gather.gate, gather.whole = gate.op.name, whole.name
    step.gathers.append(gather)
    return whole


def gather_after(
    waits: Sequence[tf.Operation], shard: tf.Tensor, dim: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers a weight when operations have run; no gradient is defined.

    Returns the gate, which sends the shard, and the whole weight.
    """
    with symbols.record.stop_recording():
        with tf.control_dependencies(waits):
            gate = tf.identity(shard)
        (whole,) = replica_collectives.gather([gate], [dim])
    return gate, whole


def uses(tensor: tf.Tensor, views: tuple = ()) -> list[tuple]:
    """The operations that compute with a tensor, or with a view of it.

    For each `(operation, [(index of its input, views), ...])`: `views` are the
    operations from a whole weight to the tensor.
    """
    found: dict[tf.Operation, list] = {}
    for op in tensor.consumers():
        if _is_view(op, tensor):
            for user, inputs in uses(op.outputs[0], (*views, op)):
                found.setdefault(user, []).extend(inputs)
            continue
        for index, value in enumerate(op.inputs):
            if value is tensor:
                found.setdefault(op, []).append((index, views))
    return list(found.items())


# Cheap operations between a weight and its use.
_VIEWS = {
    *("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"),
    *("StopGradient", "Transpose"),
}
BACKWARD = "gradient_tape/"


def _is_view(op, tensor):
    """Whether an operation of the forward is a cheap view of a tensor."""
    return (
        op.type in _VIEWS
        and BACKWARD not in op.name
        and all(x is tensor or x.op.type == "Const" for x in op.inputs)
    )


def _with_gradient(whole, shard, dim, note=lambda gradient: None):
    """A gathered weight, whose gradient is reduced and scattered."""
    shape = shard.shape

    def scatter(gradient):
        batch_shard = step_context.current().batch_shard
        if batch_shard is not None:
            gradient = batch_shard.weigh(gradient)
        (summed,) = replica_collectives.reduce_scatter_here([gradient], [dim])
        return summed

    def backward(gradients, _):
        (gradient,) = gradients
        if vectorized_map.is_of_iteration(gradient):
            # Most often of no use: a tape goes back to weights also where it is
            # asked for other gradients. No update takes it, as it is whole.
            return [gradient]
        # It may be the last operation of a tape, and is named like
        # TensorFlow's: see step/shard_errors.py.
        with tf.name_scope(BACKWARD):
            # Sparse rows of a lookup become dense.
            gradient = tf.convert_to_tensor(gradient)
            if gradient.shape == shape:
                # `tf.recompute_grad` differentiates by variable, so this
                # gradient is reduced and scattered already.
                return [tf.identity(gradient)]
            if symbols.record.could_possibly_record():
                # Another tape is around this one.
                with symbols.record.stop_recording():
                    summed = tf.stop_gradient(scatter(gradient))
                (summed,) = with_gradient(
                    _refuse_second_derivative, [summed], [gradient]
                )
            else:
                summed = scatter(gradient)
        note(summed)
        return [summed]

    (whole,) = with_gradient(backward, [whole], [shard])
    return whole


def _refuse_second_derivative(*_):
    """A tape would treat the sum over replicas as constant."""
    raise ValueError(
        "With zero_stage=3 a loss must not contain gradients of weights, "
        "because a tape returns them summed over replicas. Received: a loss "
        "with such gradients, whose derivatives would be wrong. Use "
        "zero_stage=1, or gradients with respect to inputs, as in a gradient "
        "penalty."
    )
