"""BatchNormalization on replicas: moving statistics of the whole batch.

Keras lets each replica make moving averages of its own rows: they drift apart,
those of the first replica are saved, and of no rows they are not a number. Here
a layer notes down how many elements it saw, and their mean and variance. These
travel in the all-reduce of the gradients, or at the end of the step if there is
none, each replica's in a place of its own, so that of all replicas r

    mean      = sum_r p_r mean_r                              p_r: its share
    variance  = sum_r p_r (variance_r + (mean_r - mean)^2)

are those of the whole batch to the last digit, and equal on all replicas. A
layer with `synchronized=True` does this at once, and normalises by them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfscale import in_place
from tfscale import rank_context
from tfscale.tensor_parallel import layer_losses
from tfscale.tensor_parallel.rules import rules


class ReplicaBatchNormalization(in_place.Mixin):
    """What is put in front of the class of a layer while replicas run."""

    def _moments(self, inputs, mask):
        step = _current_step()
        if step is None:
            return super()._moments(inputs, mask)
        if mask is None:
            # Keras would put those of all replicas together, one by one.
            axis = self.axis % inputs.shape.rank
            axes = [i for i in range(inputs.shape.rank) if i != axis]
            mean, variance = keras.ops.moments(inputs, axes)
            count = tf.size(inputs) // inputs.shape[self.axis]
        else:
            mean, variance = super()._moments(inputs, mask)
            count = tf.reduce_sum(tf.cast(mask, tf.int32))
        # Of no rows: anything finite, or a weight's gradient is 0 times NaN.
        mean = tf.where(count > 0, mean, tf.zeros_like(mean))
        variance = tf.where(count > 0, variance, tf.ones_like(variance))
        moments = tf.cast(count, mean.dtype), mean, variance
        if self.synchronized:
            with layer_losses.kept():
                (of_all,) = step.sums([step.in_its_place(moments)])
            return _of_whole_batch(of_all)
        step.note(self, moments)
        return mean, variance

    def _update_renorm_statistics(self, mean, variance):
        if _current_step() is None or self.synchronized:
            super()._update_renorm_statistics(mean, variance)

    def update_moving(self, mean, variance):
        """Moving averages, from those in the variables and a batch's."""
        super()._update_renorm_statistics(mean, variance)


@dataclasses.dataclass
class Noted:
    """The calls of a layer in a step, and the averages before the first."""

    layer: keras.layers.BatchNormalization
    before: tuple[tf.Tensor, tf.Tensor]
    calls: list

    @classmethod
    def of(cls, layer, mean):
        """Of a layer whose averages are whole, or this rank's channels."""
        variables = layer.moving_mean, layer.moving_variance
        read = tf.convert_to_tensor
        if mean.shape.num_elements() != layer.moving_mean.shape[0]:
            read = rules.shard_of
        return cls(layer, tuple(map(read, variables)), [])

    def assign(self, moments) -> None:
        """Makes averages of moments of the whole batch, one for each call."""
        layer, averages = self.layer, list(self.before)
        if layer.renorm:
            for mean, variance in moments:
                layer.update_moving(mean, variance)
            return
        for each in moments:
            averages = [
                average * layer.momentum
                + tf.cast(new, average.dtype) * (1.0 - layer.momentum)
                for average, new in zip(averages, each)
            ]
        variables = layer.moving_mean, layer.moving_variance
        for variable, average in zip(variables, averages):
            if average.shape == variable.shape:
                variable.assign(average)
            else:
                rules.assign_shard(variable, average)


class Step:
    """What the layers of a replica note down in a step."""

    def __init__(self):
        self._context = tf.distribute.get_replica_context()
        self._noted = {}
        self.graph = tf.compat.v1.get_default_graph()

    def note(self, layer, moments) -> None:
        """Adds a call of a layer: count, mean and variance."""
        if id(layer) not in self._noted:
            self._noted[id(layer)] = Noted.of(layer, moments[1])
        self.note_call(self._noted[id(layer)], moments)

    def note_call(self, noted: Noted, moments) -> None:
        """Adds a call of a layer that is known."""
        self._noted[id(noted.layer)] = noted
        moments = tuple(map(tf.stop_gradient, moments))
        noted.calls.append(self.in_its_place(moments))

    def in_its_place(self, moments) -> tf.Tensor:
        """The moments, where those of the other replicas are zeros."""
        # Of one channel that is masked, Keras has scalars.
        row = tf.concat([tf.reshape(x, [-1]) for x in moments], axis=0)
        place = tf.one_hot(
            self._context.replica_id_in_sync_group,
            self._context.num_replicas_in_sync,
            dtype=row.dtype,
        )
        return place[:, tf.newaxis] * row

    def sums(self, tensors) -> list[tf.Tensor]:
        """The sums over the replicas of some tensors."""
        if self._context.num_replicas_in_sync == 1:
            return list(tensors)
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def take(self) -> list[Noted]:
        """What has been noted since it was taken the last time."""
        noted, self._noted = list(self._noted.values()), {}
        return noted


@contextlib.contextmanager
def noting() -> Iterator[Step]:
    """Within it, layers of this replica note down what they saw."""
    step = Step()
    with rank_context.within(batch_norm_step=step):
        yield step
        all_sums_and_statistics(step.sums, [])


def all_sums_and_statistics(all_reduce, tensors) -> list[tf.Tensor]:
    """Sums over the replicas; what layers have noted down goes with them.

    Args:
        all_reduce: Takes a list of tensors, returns their sums.
        tensors: Of this replica.

    Returns:
        The sums of `tensors`.
    """
    step = _current_step()
    noted = [] if step is None else step.take()
    rows = [row for each in noted for row in each.calls]
    if not tensors and not rows:
        return []
    found = list(all_reduce([*tensors, *rows]))
    moments = map(_of_whole_batch, found[len(tensors) :])
    for each in noted:
        each.assign([next(moments) for _ in each.calls])
    return found[: len(tensors)]


def _of_whole_batch(rows):
    """Mean and variance, of each replica's count, mean and variance."""
    num_channels = (rows.shape[1] - 1) // 2
    counts, means, variances = tf.split(
        rows, [1, num_channels, num_channels], axis=1
    )
    weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
    total = functools.partial(tf.reduce_sum, axis=0)
    mean = total(weights * means)
    return mean, total(weights * (variances + tf.square(means - mean)))


def _current_step() -> Step | None:
    """That of this thread, where replicas can meet."""
    step = rank_context.current().batch_norm_step
    if step is None or step.graph is not tf.compat.v1.get_default_graph():
        return None
    return step
