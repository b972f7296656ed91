"""The gradients of one device, for a `train_step` that uses their values."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfscale.collectives import rank_collectives
from tfscale.collectives import replica_collectives
from tfscale.context import step_context
from tfscale.mesh import gradient_reduction
from tfscale.mesh.extended import MeshExtended


def sum_gradients(
    gradients: Iterable[tf.Tensor | tf.IndexedSlices | None],
    variables: Iterable[keras.Variable],
) -> list[tf.Tensor | None]:
    """Sums gradients of replicas and ranks to those of one device.

    A tape in a `train_step` gives gradients of the rows of a replica and, on
    model ranks, of a shard of each variable. Clipping, norms and additions need
    whole gradients: this sums them over the replicas and puts shards together.
    `optimizer.apply` takes what is made of the result on any mesh. It must be
    the same on all replicas: made of sums, variables and constants.

    On one device it only sums the rows of lookups, so that the same step trains
    there. All replicas have to call it, in a step of a compiled model, outside
    of branches and loops.

    Args:
        gradients: For each variable a tensor, `tf.IndexedSlices` or None, of
            the shape that the tape gives.
        variables: The trainable variables that they are of, made in the scope
            of the strategy.

    Returns:
        For each variable a tensor of its whole shape, or None.

    Raises:
        ValueError: If there is no sum yet, in a microbatch of
            `GradientAccumulation`; if it is called outside of a step that
            replicas run, or for variables made outside of the scope.
        TypeError: If another strategy than a `MeshStrategy` has replicas.

    Example: clipping by hand.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tfscale
    >>> class Clipped(keras.Model):
    ...     def train_step(self, data):
    ...         x, y = data
    ...         with tf.GradientTape() as tape:
    ...             loss = self.compute_loss(x, y, self(x, training=True))
    ...         variables = self.trainable_variables
    ...         gradients = tape.gradient(loss, variables)
    ...         gradients = tfscale.sum_gradients(gradients, variables)
    ...         gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
    ...         self.optimizer.apply(gradients, variables)
    ...         return {"norm": norm}
    >>> tfscale.use_virtual_devices(8)
    >>> with tfscale.MeshStrategy(tfscale.device_mesh(data=2)).scope():
    ...     inputs = keras.Input((4,))
    ...     model = Clipped(inputs, keras.layers.Dense(1)(inputs))
    ...     model.compile("sgd", "mse")
    >>> x = keras.ops.ones((8, 4))
    >>> history = model.fit(x, x[:, :1], verbose=0)
    """
    gradients, variables = list(gradients), list(variables)
    if step_context.current().gradient_capture is not None:
        raise ValueError(
            "`sum_gradients` needs all gradients of a batch. Received: a call "
            "in a microbatch of GradientAccumulation, with more microbatches "
            "to come. Use `clipnorm` or `global_clipnorm` of the optimizer, "
            "or override its `apply`, which gets the gradients of the whole "
            "batch."
        )
    strategy = tf.distribute.get_strategy()
    extended = strategy.extended
    if not isinstance(extended, MeshExtended):
        if strategy.num_replicas_in_sync == 1:
            return [_dense(gradient) for gradient in gradients]
        raise TypeError(
            "`sum_gradients` sums over the replicas of a "
            f"`tfscale.MeshStrategy`. Received: {type(strategy).__name__}, "
            "whose optimizers would sum them once more. Use a MeshStrategy."
        )
    extended.replica_and_rank()  # an error outside of replicas
    step = step_context.current()
    if extended.has_several_replicas and step.batch_shard is None:
        raise ValueError(
            "Sums of gradients count by the rows of a batch, which are known "
            "in a step of a compiled model. Received: `sum_gradients` in "
            "another function. Put it into `train_step`, and call "
            "`strategy.run(model.train_step, args=(batch,))`."
        )
    sums = gradient_reduction.sum_weighed(extended, gradients, variables)
    return list(map(_dense, _whole(sums, variables, extended)))


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _whole(sums, variables, extended):
    """Whole sums, from this replica's and rank's shards."""
    states = extended.optimizer_states
    shardings = [states.sharding_of(variable) for variable in variables]
    sums = list(sums)
    indices = [
        i
        for i, sharding in enumerate(shardings)
        if sums[i] is not None and sharding.data_dim is not None
    ]
    gathered = replica_collectives.gather(
        [sums[i] for i in indices], [shardings[i].data_dim for i in indices]
    )
    for i, whole in zip(indices, gathered):
        sums[i] = whole
    for i, sharding in enumerate(shardings):
        if sums[i] is not None and sharding.model_dim is not None:
            sums[i] = rank_collectives.concat_over_ranks(
                sums[i], sharding.model_dim
            )
    return sums
