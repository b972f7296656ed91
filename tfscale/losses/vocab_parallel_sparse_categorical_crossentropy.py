"""Cross-entropy of logits whose vocabulary is sharded over the model ranks.

With z the logits of one token, y its label, K the size of the vocabulary and s
the label smoothing, the loss and its gradient are

    log(sum_k exp(z_k)) - (1 - s) z_y - s / K sum_k z_k
    softmax(z)_k - (1 - s) [k = y] - s / K

A rank that has some of the z_k adds its terms to the three sums, and has all
that it needs for the gradient of its own.

Source: Shoeybi et al., Megatron-LM (2019), section 3, "fuse the output of the
parallel GEMM with the cross entropy loss".
"""

from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import rank_collectives


@keras.saving.register_keras_serializable(package="tfscale")
class VocabParallelSparseCategoricalCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels and logits, in parts where they are.

    The same numbers as `keras.losses.SparseCategoricalCrossentropy` of
    `from_logits=True`. In addition, where predictions are logits that
    a model rank gathered from the parts that all ranks have (the output of a
    dense layer or reverse embedding sharded along the vocabulary), it takes
    this rank's part in their place. Ranks then exchange three numbers for each
    token, and the logits of the whole vocabulary never exist on one device,
    unless a metric, say, uses the predictions too. Under a
    mesh with no model axis, or no strategy, it is plain cross-entropy.

    Called in replica context, as `fit` does.

    Source: Shoeybi et al., Megatron-LM (2019), section 3;
    `vocab_parallel_cross_entropy` of Megatron-LM. Label smoothing as in
    `keras.losses.CategoricalCrossentropy`.

    Args:
        ignore_class: Optional integer, a label whose tokens do not count: they
            have loss 0, and the mean is over the others.
        label_smoothing: Float from 0 to 1: how much of each label is spread
            evenly over the vocabulary.
        reduction: As of `keras.losses.Loss`.
        name: Name of the loss.
        dtype: Dtype of the computation; `None` for `keras.config.floatx()`.

    Call arguments:
        y_true: Integer labels of shape `(batch, ...)`, or `(batch, ..., 1)`.
        y_pred: Logits of shape `(batch, ..., vocabulary)`, of a floating dtype.

    Returns:
        A scalar, or losses of shape `(batch, ...)` if there is no reduction, in
        the loss's dtype. The loss of a label that is not in the vocabulary is
        NaN.

    Raises:
        ValueError: If `label_smoothing` is not from 0 to 1.

    Example: two equally likely tokens.

    >>> import numpy as np
    >>> import tfscale
    >>> loss = tfscale.losses.VocabParallelSparseCategoricalCrossentropy(
    ...     ignore_class=-1
    ... )
    >>> round(float(loss(np.array([1, 0, -1]), np.zeros((3, 2)))), 4)
    0.6931
    """

    def __init__(
        self,
        ignore_class: int | None = None,
        label_smoothing: float = 0.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "vocab_parallel_sparse_categorical_crossentropy",
        dtype: Any = None,
    ):
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                "`label_smoothing` must be from 0 to 1. Received: "
                f"label_smoothing={label_smoothing}."
            )
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_class = ignore_class
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Losses of shape `(batch, ...)`."""
        labels = y_true
        if labels.shape.rank == y_pred.shape.rank:
            labels = tf.squeeze(labels, axis=-1)
        labels = tf.cast(labels, tf.int64)
        # Not while building, when there are no shapes to speak of.
        found = rank_collectives.shard_before_gather(y_pred)
        is_sharded = found is not None and found[1] == y_pred.shape.rank - 1
        logits = found[0] if is_sharded else y_pred
        size = logits.shape[-1]
        first = size * rank_collectives.rank() if is_sharded else 0
        total = size * rank_collectives.num_ranks() if is_sharded else size
        valid = None
        if self.ignore_class is not None:
            valid = tf.not_equal(labels, self.ignore_class)
            labels = tf.where(valid, labels, 0)
        losses = _cross_entropy(
            tf.reshape(logits, (-1, size)),
            tf.reshape(labels, (-1,)),
            first=first,
            total=total,
            smoothing=self.label_smoothing,
            add_up=rank_collectives.total_over_ranks
            if is_sharded
            else tf.identity,
            largest=rank_collectives.max_over_ranks
            if is_sharded
            else tf.identity,
        )
        losses = tf.reshape(losses, tf.shape(labels))
        losses.set_shape(labels.shape)
        if valid is not None:
            losses = tf.where(valid, losses, 0.0)
            symbols.set_keras_mask(losses, valid)
        return losses

    def get_config(self) -> dict[str, Any]:
        """See `keras.losses.Loss.get_config`."""
        return {
            **super().get_config(),
            "ignore_class": self.ignore_class,
            "label_smoothing": self.label_smoothing,
        }


def _cross_entropy(logits, labels, *, first, total, smoothing, add_up, largest):
    """Losses of shape `(tokens,)` of logits of shape `(tokens, part)`.

    `first` is the token that the first logit is of; `add_up` and `largest`
    go over the parts.
    """

    @tf.custom_gradient
    def losses_of(logits):
        size = logits.shape[-1]
        # Less than what exp can take; not more, so that one term is 1.
        shift = largest(tf.reduce_max(logits, axis=-1))
        shifted = logits - shift[:, tf.newaxis]
        terms = tf.exp(shifted)
        local_labels = labels - first
        is_here = (local_labels >= 0) & (local_labels < size)
        local_labels = tf.where(is_here, local_labels, 0)
        here = tf.cast(is_here, logits.dtype)
        # No product: 0 times the logit of a token that is ruled out is NaN.
        at_label = tf.gather(shifted, local_labels, axis=1, batch_dims=1)
        at_label = tf.where(is_here, at_label, 0.0)
        sums = [tf.reduce_sum(terms, axis=-1), at_label]
        if smoothing:
            sums.append(tf.reduce_sum(shifted, axis=-1))
        sums = tf.unstack(add_up(tf.stack(sums)), num=len(sums))
        losses = tf.math.log(sums[0]) - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / total * sums[2]
        exists = (labels >= 0) & (labels < total)
        losses = tf.where(exists, losses, float("nan"))

        def gradient(upstream):
            slopes = terms / sums[0][:, tf.newaxis] - smoothing / total
            indices = tf.stack(
                [tf.range(tf.size(local_labels, tf.int64)), local_labels],
                axis=1,
            )
            slopes = tf.tensor_scatter_nd_sub(
                slopes, indices, (1 - smoothing) * here
            )
            return slopes * upstream[:, tf.newaxis]

        return losses, gradient

    return losses_of(logits)
