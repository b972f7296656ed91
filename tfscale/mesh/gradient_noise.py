"""The noise scale of gradients, from gradients that training computes anyway.

A batch has shards: replicas or microbatches. Shard i counts for w_i of it and
has b_i rows; G is the expected gradient and S the trace of the covariance of
the gradient of a row:

    E sum_i |w_i g_i|^2   = q |G|^2 + r S        q = sum_i w_i^2
    E |sum_i w_i g_i|^2   =   |G|^2 + r S        r = sum_i w_i^2 / b_i

Each step gives two numbers for two equations. The noise scale is a ratio of two
expectations, so each is averaged over steps before they are divided.

Source: McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch
Training (2018), appendix A.1, there with equal shards.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.fit.fit import Fit
from tfscale.graphs.noting_scope import plain_variable
from tfscale.mesh.update.clipping import is_sharded
from tfscale.mesh.update.clipping import squares


class GradientNoise:
    """Averages the terms of a noise scale over steps."""

    def __init__(self, model: keras.Model, smoothing: float):
        self._optimizer = model.optimizer
        self._ids = {id(v) for v in model.trainable_variables}
        self._smoothing = smoothing
        self._fit: Fit | None = None
        # |G|^2, S, and the weight of both.
        self._means = plain_variable(
            np.zeros(3, np.float32), name="tfscale/gradient_noise"
        )

    def begin(self, fit: Fit) -> None:
        """Measures the steps that are traced in a `fit`."""
        self._fit = fit

    def is_of(self, model: keras.Model) -> bool:
        """Whether it measures the gradients of a model, as compiled."""
        return (
            self._optimizer is model.optimizer
            and {id(v) for v in model.trainable_variables} == self._ids
        )

    @property
    def means(self) -> np.ndarray:
        """|G|^2, S and their weight, as weighted sums; what `set` takes."""
        return self._means.numpy()

    def set(self, means: Any) -> None:
        """Continues from `means`."""
        self._means.assign(means)

    def terms(self, gradients, variables) -> list[tf.Tensor]:
        """The terms of a replica in its step, to be summed with the gradients.

        In replica context, outside of branches; none in a step that is not
        measured.
        """
        shard = step_context.current().batch_shard_in_graph
        if (
            self._fit is None
            or shard is None
            or not self._fit.is_running
            or not {id(v) for v in variables} <= self._ids
        ):
            return []
        # Without rows there is no share.
        rows, share = tf.maximum(shard.rows, 1.0), shard.share
        local = _over_ranks(squared_norms(gradients), gradients, variables)
        terms = tf.stack([local, share**2, share**2 / rows])
        return [tf.stop_gradient(terms)]

    def of_replicas(self, totals, sums, variables, extended) -> None:
        """Notes a step of replicas, by the sums of `terms` and gradients."""
        for terms in totals:
            summed_squares, q, r = tf.unstack(terms)
            whole = tf.add_n(squares(sums, variables, extended))
            self._add(summed_squares, tf.cast(whole, tf.float32), q, r)

    def of_microbatches(self, summed_squares, sums, variables, q, r) -> None:
        """Notes a step of one replica that accumulates; see the module."""
        summed_squares = _over_ranks(summed_squares, sums, variables)
        whole = _over_ranks(squared_norms(sums), sums, variables)
        self._add(summed_squares, whole, q, r)

    def _add(self, summed_squares, whole, q, r):
        # As the loss was scaled.
        scale = tf.cast(self._loss_scale(), tf.float32) ** 2
        summed_squares, whole = summed_squares / scale, whole / scale
        is_finite = tf.math.is_finite(tf.stack([summed_squares, whole]))
        is_good = (q < 1.0) & tf.reduce_all(is_finite)
        square = tf.math.divide_no_nan(whole - summed_squares, 1.0 - q)
        variance = tf.math.divide_no_nan(
            summed_squares - q * whole, (1.0 - q) * r
        )
        new = tf.stack([square, variance, 1.0])
        if symbols.get_current_replica_id_as_int():
            return  # the others have the same numbers
        before = self._means.read_value()
        mean = self._smoothing * before + (1.0 - self._smoothing) * new
        self._means.assign(tf.where(is_good, mean, before), read_value=False)

    def _loss_scale(self):
        dynamic = getattr(self._optimizer, "dynamic_scale", None)
        if dynamic is not None:
            return tf.convert_to_tensor(dynamic)
        return self._optimizer.loss_scale_factor or 1.0


def squared_norms(gradients: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Squared norms of the gradients that are not None, a float32 vector."""
    tensors = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    as_float = [tf.cast(tensor, tf.float32) for tensor in tensors]
    return tf.stack([tf.reduce_sum(tf.square(x)) for x in as_float])


def _over_ranks(local_squares, gradients, variables):
    given = [v for g, v in zip(gradients, variables) if g is not None]
    sharded = np.array([is_sharded(v) for v in given])
    if not sharded.any():
        return tf.reduce_sum(local_squares)
    shards = tf.reduce_sum(tf.boolean_mask(local_squares, sharded))
    rest = tf.reduce_sum(tf.boolean_mask(local_squares, ~sharded))
    return rank_collectives.sum_over_ranks(shards) + rest
