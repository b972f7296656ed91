"""Uneven data: workers have different numbers of batches.

All workers run each step. A worker without batches continues with empty ones
until no worker has any.
"""

import tensorflow as tf

from tfscale.collectives.workers import Workers
from tfscale.mesh.inputs import common_order


def padded_to_longest(dataset: tf.data.Dataset, workers: Workers):
    """A dataset padded to the number of batches of the longest one.

    Keras counts batches where it can, and would end an epoch here while the
    others wait in the next step. The last batches may be empty.
    """
    length = int(dataset.cardinality())
    is_infinite = length == tf.data.INFINITE_CARDINALITY
    workers.coordination.check_same(
        "dataset",
        {
            "dataset": f"{dataset.element_spec}, {is_infinite=}",
            "order of `tfscale.data`": common_order.of_pipelines(
                dataset, of_all=False
            ),
        },
    )
    lengths = workers.all_gather(tf.constant([length], tf.int64))
    longest, shortest = int(max(lengths)), int(min(lengths))
    if shortest == longest:
        return dataset
    if shortest < 0 or not _is_dense(dataset):
        # Without a count, all continue until no worker has a batch.
        return dataset.take_while(lambda *_: True)
    nothing = tf.data.Dataset.from_tensors(
        tf.nest.map_structure(_no_rows, dataset.element_spec)
    )
    return dataset.concatenate(nothing.repeat(longest - length))


def _is_dense(dataset):
    return all(
        isinstance(spec, tf.TensorSpec) and spec.shape.rank
        for spec in tf.nest.flatten(dataset.element_spec)
    )


def _no_rows(spec):
    # The first dim differs from that of batches, so it is unknown.
    return tf.zeros([0, *(dim or 0 for dim in spec.shape[1:])], spec.dtype)
