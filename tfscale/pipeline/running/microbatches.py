"""Divides a batch into microbatches, of any number of rows."""

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from tfscale.pipeline.tracing import keys
from tfscale.whole_batch import losses


def divide(
    batch: dict[Hashable, tf.Tensor], count: int
) -> list[dict[Hashable, tf.Tensor]]:
    """Divides a batch into microbatches whose sizes differ by one row at most.

    Of a batch with fewer rows than there are microbatches, some get a row that
    counts nothing, because many operations fail on no rows.

    Returns:
        The tensors of each microbatch, by key, and how many of their rows
        count, a scalar, as `Rows`.
    """
    first = next(iter(batch.values()))
    rows = first.shape[0]
    divides = rows is not None and rows % count == 0
    if divides:
        sizes = [rows // count] * count
    else:
        rows = tf.shape(first)[0]
        more = tf.cast(tf.range(count) < rows % count, rows.dtype)
        sizes = tf.unstack(rows // count + more)
    microbatches: list[dict[Hashable, Any]] = [
        {keys.Rows(): tf.cast(size, losses.precision())} for size in sizes
    ]
    for key, tensor in batch.items():
        if divides:
            parts = tf.split(tensor, count)
        else:
            parts = tf.split(
                _with_rows(tensor, count),
                [tf.maximum(size, 1) for size in sizes],
            )
        for microbatch, part in zip(microbatches, parts):
            microbatch[key] = part
    return microbatches


def _with_rows(tensor, num_rows):
    """The tensor with at least some number of rows; new ones count nothing.

    They are copies of the first row, or ones where a replica has no row.
    """
    sizes = tf.shape(tensor)
    one = tf.zeros if tensor.dtype == tf.string else tf.ones
    row = one(tf.concat([[1], tf.maximum(sizes[1:], 1)], axis=0), tensor.dtype)
    row = tf.concat([tensor[:1], row], axis=0)[:1]
    # To repeat it is not implemented for all types.
    more = tf.gather(
        row, tf.zeros([tf.maximum(num_rows - sizes[0], 0)], "int32")
    )
    return tf.ensure_shape(
        tf.concat([tensor, more], axis=0), [None, *tensor.shape[1:]]
    )
