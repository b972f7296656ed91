"""BatchNormalization over shards of a batch: replicas and microbatches.

In Keras each replica averages its own rows: the averages drift apart, those of
the first replica are saved, and without rows they are NaN. Here a layer notes,
for each call, the number of elements, their mean and their variance. The
moments of all shards p (microbatches of a loop or a pipeline, replicas) are

    count     n = sum_p n_p
    mean      m = sum_p n_p / n * m_p
    variance      sum_p n_p / n * (v_p + (m_p - m)^2)

which are the moments of the whole batch, to the last digit, in any grouping.
Moments of replicas are summed with the gradients, or at the end of the step if
there are none, each replica's in a separate row. A layer with
`synchronized=True` sums them at once, and normalizes by them.

Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances (1979), equations 2.1.
"""

import contextlib
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfscale.context import step_context
from tfscale.graphs.with_gradient import with_gradient
from tfscale.tensor_parallel.rules import rules


def pack(count, mean, variance) -> tf.Tensor:
    """Count, mean and variance of a shard, of shape `(3, channels)`."""
    if mean.shape.rank != 1:  # For one masked channel Keras returns scalars.
        mean, variance = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
    counts = tf.fill(mean.shape, tf.cast(count, mean.dtype))
    return tf.stack([counts, mean, variance])


def combined(moments: tf.Tensor) -> tf.Tensor:
    """The moments of all shards, from `(shards, 3, channels)`."""
    counts, means, variances = tf.unstack(moments, axis=1)
    count = tf.reduce_sum(counts, axis=0)
    shares = tf.math.divide_no_nan(counts, count)
    mean = tf.reduce_sum(shares * means, axis=0)
    variances = shares * (variances + tf.square(means - mean))
    return tf.stack([count, mean, tf.reduce_sum(variances, axis=0)])


@dataclasses.dataclass(frozen=True)
class MovingAverages:
    """The moving averages of a layer before a call in a step."""

    layer: keras.layers.BatchNormalization
    before: tuple[tf.Tensor, tf.Tensor]

    @classmethod
    def of(cls, layer, num_channels: int) -> "MovingAverages":
        """The averages of a layer: whole, or this rank's channels."""
        variables = layer.moving_mean, layer.moving_variance
        read = tf.convert_to_tensor
        if num_channels != layer.moving_mean.shape[0]:
            read = rules.shard_of
        return cls(layer, tuple(map(read, variables)))

    def update(self, moments: Iterable[tf.Tensor]) -> None:
        """Updates the averages by the whole batch's moments of each call."""
        layer, averages = self.layer, list(self.before)
        moments = [tf.unstack(each)[1:] for each in moments]
        if layer.renorm:
            for mean, variance in moments:
                layer.update_moving(mean, variance)
            return
        for each in moments:
            averages = [
                # In the dtype of the moments: in bfloat16 a momentum of 0.99 is
                # 0.988, with which an average of threes ends at 2.6.
                tf.cast(average, new.dtype) * layer.momentum
                + new * (1.0 - layer.momentum)
                for average, new in zip(averages, each)
            ]
        variables = layer.moving_mean, layer.moving_variance
        for variable, average in zip(variables, averages):
            if average.shape == variable.shape:
                variable.assign(average)
            else:
                rules.assign_shard(variable, average)


class NotedMoments:
    """The moments that the layers of a replica note, in a step or microbatch.

    Attributes:
        calls: For each call of a layer, in order, its moving averages and the
            moments of its input.
    """

    def __init__(self):
        self.calls: list[tuple[MovingAverages, tf.Tensor]] = []
        self.graph = tf.compat.v1.get_default_graph()

    def moments_of(self, layer, moments_of_keras, inputs, mask):
        """Mean and variance that a layer normalizes by, and notes down."""
        if mask is None:
            # Keras would sum the moments over replicas, one layer at a time.
            axis = layer.axis % inputs.shape.rank
            axes = [i for i in range(inputs.shape.rank) if i != axis]
            mean, variance = keras.ops.moments(inputs, axes)
            size = inputs.shape.num_elements()
            size = tf.size(inputs) if size is None else size
            count = size // inputs.shape[layer.axis]
        else:
            mean, variance = moments_of_keras(inputs, mask)
            count = tf.reduce_sum(tf.cast(mask, tf.int32))
        if tf.is_tensor(count):
            # Without rows any finite value will do; NaN would give a NaN
            # gradient of what is multiplied by it.
            mean, variance = _finite(count, mean, variance)
        moments = pack(count, mean, variance)
        if layer.synchronized:
            (of_all,) = sum_over_replicas([in_its_row(moments)])
            return tf.unstack(combined(of_all))[1:]
        # Of this rank's channels.
        averages = MovingAverages.of(layer, moments.shape[1])
        self.calls.append((averages, tf.stop_gradient(moments)))
        return mean, variance

    def take(self) -> list[tuple[MovingAverages, tf.Tensor]]:
        """The calls noted since the last `take`."""
        calls, self.calls = self.calls, []
        return calls


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums of tensors over the replicas of all workers; in replica context."""
    if not tensors or step_context.num_replicas() == 1:
        return list(tensors)
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def in_its_row(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in this replica's row, of all; the other rows are zero."""
    context = tf.distribute.get_replica_context()
    row = tf.one_hot(
        context.replica_id_in_sync_group,
        step_context.num_replicas(),
        on_value=True,
        off_value=False,
    )
    row = tf.reshape(row, [-1] + [1] * tensor.shape.rank)
    # A maximum of no rows is infinite.
    return tf.where(row, tensor, tf.zeros_like(tensor))


def _finite(count, mean, variance):
    """The moments, or 0 if they are of no elements.

    The gradient goes on as it is, to no elements: another one would be a dozen
    operations, in each layer of each replica.
    """
    given = [mean, variance]
    counts = tf.cast(tf.minimum(count, 1), mean.dtype)
    found = [tf.math.multiply_no_nan(each, counts) for each in given]
    return with_gradient(_unchanged, found, given)


def _unchanged(gradients, inputs):
    del inputs
    return gradients


@contextlib.contextmanager
def noting() -> Iterator[NotedMoments]:
    """Within it, layers of this replica note the moments of their inputs.

    Within another one of the same graph, that one goes on.
    """
    moments = step_context.current().moments_in_graph
    if moments is not None:
        yield moments
        return
    moments = NotedMoments()
    with step_context.within(moments=moments):
        yield moments
        all_sums_and_statistics(sum_over_replicas, [])


def all_sums_and_statistics(all_reduce, tensors) -> list[tf.Tensor]:
    """Sums tensors over the replicas, together with the noted moments.

    The moments of all layers on a device are one tensor.
    """
    step = step_context.current().moments_in_graph
    calls = [] if step is None else step.take()
    moments = [of_call for _, of_call in calls]
    if step_context.num_replicas() > 1:
        sums, moments = _summed(all_reduce, tensors, moments)
    else:
        sums = list(tensors)
    of_layers: dict[int, tuple[MovingAverages, list]] = {}
    for (averages, _), of_call in zip(calls, moments):
        # Keras changes the averages in each call: those of the first count.
        _, found = of_layers.setdefault(id(averages.layer), (averages, []))
        found.append(of_call)
    for averages, found in of_layers.values():
        with tf.device(averages.before[0].device):
            averages.update(found)
    return sums


def _summed(all_reduce, tensors, moments):
    """Sums of tensors, and moments of the rows of all replicas."""
    groups: dict[tuple, list[int]] = {}
    for index, each in enumerate(moments):
        groups.setdefault((each.device, each.dtype), []).append(index)
    packed = []
    for (device, _), indices in groups.items():
        with tf.device(device):
            joined = tf.concat([moments[i] for i in indices], axis=1)
            packed.append(in_its_row(joined))
    found = list(all_reduce([*tensors, *packed]))
    moments = list(moments)
    for ((device, _), indices), rows in zip(
        groups.items(), found[len(tensors) :]
    ):
        sizes = [moments[i].shape[1] for i in indices]
        with tf.device(device):
            for i, each in zip(indices, tf.split(combined(rows), sizes, 1)):
                moments[i] = each
    return found[: len(tensors)], moments
